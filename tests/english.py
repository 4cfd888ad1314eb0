"""Counts un-English wording in docs, docstrings, comments and messages. Fails if there is any.

    tests/english.py                    every hit with its remedy, then the counts for each rule and folder
    tests/english.py kernels docs       only these files and folders
    tests/english.py --count            only the counts
    tests/english.py --rule alone       only one rule; --rules lists them with their reasons

It reads Markdown files, comments in protos, C++ and Python, docstrings, and Python's other strings if they are longer
than three words or end with a full stop (errors, logs, help). It skips tests and generated code. The rules are in
tests/english_words.toml.
"""

import argparse
import ast
import io
import re
import signal
import subprocess
import sys
import tokenize
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).with_name("english_words.toml")
FEWEST_WORDS = 4
"""A string constant with fewer words is a name or a key, not a sentence, unless it ends with a full stop."""
NESTED_VALUE = "{}"
"""Stands for the value of an expression in an f-string."""


@dataclass(frozen=True)
class Passage:
    """Text that reads as one, such as a docstring or the lines of a comment, with its wrapped lines joined."""

    path: str
    lines: list[tuple[int, str]]
    """Each line's number in the file, and its words."""
    is_docstring: bool = False
    is_string: bool = False
    """Whether it is a Python string that is not a docstring."""
    text: str = field(init=False)
    starts: list[int] = field(init=False)
    """Where in ``text`` each line starts."""

    def __post_init__(self) -> None:
        lines = [(number, " ".join(words.split())) for number, words in self.lines]
        lines = [(number, words) for number, words in lines if words]
        starts, length = [], 0
        for _, words in lines:
            starts.append(length)
            length += len(words) + 1
        object.__setattr__(self, "lines", lines)
        object.__setattr__(self, "text", " ".join(words for _, words in lines))
        object.__setattr__(self, "starts", starts)

    def line_at(self, offset: int) -> int:
        """The number of the line that holds an offset of ``text``."""
        return self.lines[bisect_right(self.starts, offset) - 1][0]

    def around(self, start: int, end: int) -> str:
        """The words from one offset to another, with one or two on each side."""
        before, after = self.text[:start].split(" "), self.text[end:].split(" ")
        return " ".join(before[-3:]) + self.text[start:end] + " ".join(after[:3])


@dataclass(frozen=True)
class Rule:
    """A wording to avoid."""

    name: str
    pattern: re.Pattern[str]
    why: str
    write: str
    allow: re.Pattern[str] | None = None
    """Matches that cover a hit excuse it."""
    starts_docstring: bool = False
    """Whether the pattern must match at the start of a docstring."""
    starts_string: bool = False
    """Whether the pattern must match at the start of a docstring or of another string."""

    def hits(self, passage: Passage) -> Iterator["Hit"]:
        """Every place in a passage that breaks the rule."""
        if self.starts_docstring or self.starts_string:
            applies = passage.is_docstring or (self.starts_string and passage.is_string)
            first = self.pattern.match(passage.text) if applies else None
            found: Iterable[re.Match[str]] = [first] if first else []
        else:
            found = self.pattern.finditer(passage.text)
        excused = [match.span() for match in self.allow.finditer(passage.text)] if self.allow else []
        for match in found:
            if not any(start <= match.start() and match.end() <= end for start, end in excused):
                yield Hit(passage.path, passage.line_at(match.start()), passage.around(*match.span()), self)


@dataclass(frozen=True)
class Hit:
    """A place that breaks a rule."""

    path: str
    line: int
    words: str
    rule: Rule

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.words}" -> {self.rule.write} ({self.rule.name})'


# ----------------------------------------------------------------------------------------------------------- extraction


def passages(path: str, source: str) -> Iterator[Passage]:
    """The text for people in a file."""
    if path.endswith(".py"):
        yield from python_comments(path, source)
        yield from python_strings(path, source)
    elif path.endswith(".md"):
        yield from paragraphs(path, source)
    else:
        yield from c_comments(path, source)


def python_comments(path: str, source: str) -> Iterator[Passage]:
    """Comments; those on adjacent lines are one passage."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_directive = re.match(r"#\s*(noqa|type:|fmt:|pragma)", token.string)
        if token.type == tokenize.COMMENT and not is_directive:
            is_whole_line = not token.line[: token.start[1]].strip()
            found.append((token.start[0], token.string.lstrip("#"), is_whole_line))
    yield from joined(path, found)


def python_strings(path: str, source: str) -> Iterator[Passage]:
    """Docstrings, those of attributes included, and other strings that are sentences."""
    source_lines = source.splitlines()
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else NESTED_VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if id(node) in docstrings:
            yield Passage(path, list(enumerate(without_code(text).split("\n"), node.lineno)), is_docstring=True)
        elif len(text.split()) >= (2 if text.endswith(".") else FEWEST_WORDS):
            yield Passage(path, placed(without_code(text).split(), node.lineno, source_lines), is_string=True)


def placed(words: list[str], line: int, source_lines: list[str]) -> list[tuple[int, str]]:
    """Each word of a string with its line: a string may be written in parts, over several lines."""
    found = []
    for word in words:
        letters = max(re.findall(r"\w+", word), key=len, default="")
        ahead = range(line, min(line + 3, len(source_lines) + 1))
        line = next((number for number in ahead if letters in source_lines[number - 1]), line)
        found.append((line, word))
    return found


def c_comments(path: str, source: str) -> Iterator[Passage]:
    """Comments of C++ and of protos."""
    found = []
    for match in re.finditer(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', source, re.DOTALL):
        if match[0].startswith('"'):
            continue
        first = source.count("\n", 0, match.start()) + 1
        is_whole_line = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        for number, words in enumerate(match[0].split("\n"), first):
            found.append((number, re.sub(r"^\s*(//+|/\*+|\*+)|\*/$", "", words), is_whole_line))
    yield from joined(path, found)


def joined(path: str, comments: list[tuple[int, str, bool]]) -> Iterator[Passage]:
    """Passages of comments, each given by its line, its words and whether it has the line to itself."""
    block: list[tuple[int, str]] = []
    previous_is_whole = False
    for number, words, is_whole_line in comments:
        continues = block and number == block[-1][0] + 1 and is_whole_line and previous_is_whole and words.strip()
        if not continues and block:
            yield Passage(path, block)
            block = []
        block.append((number, without_code(words)))
        previous_is_whole = is_whole_line
    if block:
        yield Passage(path, block)


def paragraphs(path: str, source: str) -> Iterator[Passage]:
    """Paragraphs, items of lists, rows of tables, headings, and the lines of blocks of code, each by itself."""
    block: list[tuple[int, str]] = []
    is_code = False
    for number, words in enumerate(source.splitlines(), 1):
        is_fence = words.lstrip().startswith("```")
        begins = is_code or is_fence or not words.strip() or re.match(r"\s*([-*|#>]|\d+\.)", words)
        if begins and block:
            yield Passage(path, block)
            block = []
        if not is_fence:
            block.append((number, without_code(words)))
        is_code ^= is_fence
    if block:
        yield Passage(path, block)


def without_code(text: str) -> str:
    """The text with what is in backticks replaced, as it is code and not English."""
    return re.sub(r"(`+)([^`\n]+)\1", r"\1_\1", text)


# ---------------------------------------------------------------------------------------------------------- the command


def read_rules(path: Path = RULES) -> list[Rule]:
    """The rules of a file."""
    return [
        Rule(
            name=name,
            pattern=re.compile(entry["pattern"]),
            why=entry["why"],
            write=entry["write"],
            allow=re.compile("|".join(entry["allow"])) if "allow" in entry else None,
            starts_docstring=entry.get("starts_docstring", False),
            starts_string=entry.get("starts_string", False),
        )
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()
    ]


def is_scanned(path: str) -> bool:
    """Whether a tracked file has text that the rules are for."""
    folder = path.split("/", maxsplit=1)[0]
    if folder == "tests" or path.startswith("protos/google/") or re.search(r"_pb2(_grpc)?\.py$", path):
        return False
    if path.endswith((".md", ".py")):
        return True
    return path.endswith(".proto") or (folder == "kernels" and path.endswith((".cpp", ".h")))


def files(within: list[str]) -> list[str]:
    """The tracked and new files to scan, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *within]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted({path for path in listed if is_scanned(path) and (ROOT / path).is_file()})


def print_counts(hits: list[Hit]) -> None:
    """Prints how many hits each rule and each folder at the root has."""
    folders = Counter(hit.path.split("/")[0] for hit in hits)
    columns = [folder for folder, _ in folders.most_common()]
    counts = Counter((hit.rule.name, hit.path.split("/")[0]) for hit in hits)
    rules = Counter(hit.rule.name for hit in hits)
    width = max((len(name) for name in rules), default=0)
    print(" ".join([f"{'':{width}}", f"{'all':>6}", *(f"{folder:>{max(6, len(folder))}}" for folder in columns)]))
    for name, total in [*rules.most_common(), ("all", len(hits))]:
        row = [folders[folder] if name == "all" else counts[name, folder] for folder in columns]
        cells = (f"{number or '':>{max(6, len(folder))}}" for number, folder in zip(row, columns, strict=True))
        print(" ".join([f"{name:{width}}", f"{total:6}", *cells]).rstrip())


def main(argv: list[str] | None = None) -> int:
    """Prints what breaks the rules; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders below the root; default: all")
    parser.add_argument("--count", action="store_true", help="print only the counts")
    parser.add_argument("--rule", action="append", metavar="NAME", help="apply only this rule; may be repeated")
    parser.add_argument("--rules", action="store_true", help="list the rules with their reasons and exit")
    arguments = parser.parse_args(argv)
    rules = read_rules()
    names = {rule.name for rule in rules}
    for name in arguments.rule or ():
        if name not in names:
            parser.error(f"no rule named {name}; there are: {', '.join(sorted(names))}")
    rules = [rule for rule in rules if not arguments.rule or rule.name in arguments.rule]
    if arguments.rules:
        for rule in rules:
            print(f"{rule.name}: {rule.why}\n    Write {rule.write}.")
        return 0
    hits = []
    for path in files(arguments.paths):
        for passage in passages(path, (ROOT / path).read_text(encoding="utf-8")):
            hits += [hit for rule in rules for hit in rule.hits(passage)]
    hits.sort(key=lambda hit: (hit.path, hit.line))
    if not arguments.count:
        for hit in hits:
            print(hit)
    if hits:
        print_counts(hits)
        print(f"{len(hits)} places to reword; `tests/english.py --rules` has the reasons", file=sys.stderr)
    return 1 if hits else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly when a reader such as head has what it needs
    sys.exit(main())
