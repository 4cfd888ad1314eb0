"""The check of the wording: what it reads in each kind of file, and that every rule does what its examples promise."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SPEC = importlib.util.spec_from_file_location("english", TESTS / "english.py")
assert SPEC is not None
assert SPEC.loader is not None
english = importlib.util.module_from_spec(SPEC)
sys.modules["english"] = english  # where dataclasses look for it
SPEC.loader.exec_module(english)

RULES = {rule.name: rule for rule in english.read_rules()}
EXAMPLES = tomllib.loads((TESTS / "english_words.toml").read_text(encoding="utf-8"))


def breaks(rule: str, text: str) -> bool:
    passage = english.Passage("x.py", [(1, text)], is_docstring=True)
    return any(RULES[rule].hits(passage))


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_finds_what_it_is_for_and_no_more(rule: str) -> None:
    assert breaks(rule, EXAMPLES[rule]["bad"])
    assert [text for text in EXAMPLES[rule]["fine"] if breaks(rule, text)] == []


def test_every_rule_has_a_reason_and_a_remedy() -> None:
    assert 25 <= len(RULES) <= 40
    assert [name for name, rule in RULES.items() if not (rule.why.endswith(".") and rule.write)] == []


def found(path: str, source: str) -> list[tuple[int, str]]:
    """The line of each hit, and its rule."""
    hits = [hit for passage in english.passages(path, source) for rule in RULES.values() for hit in rule.hits(passage)]
    return sorted((hit.line, hit.rule.name) for hit in hits)


def test_python_has_comments_docstrings_and_sentences() -> None:
    source = '''"""Reads files.

Of the rows, the first."""

LIMIT = 3
"""Of requests."""

# The log
# says why.
name = "nobody"  # A key, not a sentence.


def run(count):
    """Returns `asked` rows, or what the row
    asks for."""
    raise ValueError(
        f"the first {count} rows are fine, "
        f"but the last one is no JSON"
    )
'''
    assert found("x.py", source) == [(6, "docstring-of"), (9, "say"), (15, "ask"), (18, "is-no")]


def test_only_docstrings_are_checked_for_how_they_start() -> None:
    assert found("x.py", '# As JSON.\nx = "As these rows are short, they fit"\n') == []


def test_no_string_may_start_with_of() -> None:
    source = """# Of rows.
index: int = Field(description="Of its input.")
names = ("Of rows", "The index of the input.")
text = "Of the rows, the first"
"""
    assert found("x.py", source) == [(2, "docstring-of"), (4, "docstring-of")]


def test_markdown_has_paragraphs_that_wrap_and_code_that_does_not() -> None:
    source = """# Title

A file that nobody reads is closed; `nobody` is a user's name. At most one
message a step.

| a | the log tells it |
- a client hangs
  up

```sh
cat file  # The log says why.
```
"""
    assert found("x.md", source) == [(3, "nobody"), (3, "per"), (6, "tell"), (7, "hang-up"), (11, "say")]


def test_comments_of_cpp_and_protos_are_read_and_their_strings_are_not() -> None:
    source = """// Reads rows of a
// matrix, as far as it goes.
const char* text = "// nobody";  // Whoever calls it.
/* Unknown fields
 * are passed over. */
"""
    assert found("x.h", source) == [(2, "as-far-as"), (3, "whoever"), (5, "passed-over")]


@pytest.mark.parametrize(
    ("path", "is_scanned"),
    [
        ("README.md", True),
        ("docs/cpu.md", True),
        ("service/llm.py", True),
        ("protos/penstock/v1/model.proto", True),
        ("kernels/cpu/csrc/gemm/int8.h", True),
        ("protos/penstock/v1/model_pb2.py", False),
        ("protos/penstock/v1/model_pb2_grpc.py", False),
        ("tests/test_english.py", False),
        ("kernels/cpu/csrc/core/exports.map", False),
    ],
)
def test_what_is_scanned(path: str, is_scanned: bool) -> None:
    assert english.is_scanned(path) == is_scanned


def test_the_command_prints_places_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("A log that nobody reads.\n")
    monkeypatch.setattr(english, "ROOT", tmp_path)
    monkeypatch.setattr(english, "files", lambda within: ["docs/a.md"])
    assert english.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('docs/a.md:1: "log that nobody reads." -> ')
    assert lines[-1].split() == ["all", "1", "1"]
    assert english.main(["--rule", "tell"]) == 0
    assert capsys.readouterr().out == ""
