"""The calls in the README and in the pages for callers, as printed, against a service on the demo model; only the port
is another."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLIENT, GRPC, BATCH, DEVELOPING, INSTALL, SIZING = [
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("client", "grpc", "batch", "developing", "install", "sizing")
]
PRINTED_TARGET = "127.0.0.1:50051"
PENSTOCK = Path(sys.executable).with_name("penstock")
# buf comes from npm, with `make check`; a system's own will do.
PATH = os.pathsep.join([str(PENSTOCK.parent), str(ROOT / "node_modules/.bin"), os.environ["PATH"]])
MAX_WORDS = 1200


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Where a service listens."""
    command = [str(PENSTOCK), "serve", "--port", "0", "--kv-cache-memory-bytes=64M"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.search(r" on (127\.0\.0\.1:\d+)$", process.stdout.readline().strip())
        try:
            assert match is not None
            yield match[1]
        finally:
            process.terminate()
            process.stdout.read()
    assert process.returncode == 0


def blocks(page: str, language: str, containing: str = "") -> list[str]:
    """A page's blocks of code in a language."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [block for block in found if containing in block]


def run(line: str, directory: Path | None = None) -> str:
    """What a shell prints for a line that succeeds."""
    environment = {**os.environ, "PATH": PATH}
    command = ["bash", "-eu", "-c", line]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(code: str, target: str) -> str:
    """What a block of Python prints."""
    return run(shlex.join([sys.executable, "-P", "-c", code.replace(PRINTED_TARGET, target)]))


def test_the_python_call_streams_text(target: str) -> None:
    (code,) = blocks(README, "python")
    assert PRINTED_TARGET in code
    assert len(run_python(code, target)) > 20


@pytest.mark.parametrize(
    ("containing", "printed"),
    [
        ("continue_from=first", r"\S"),
        ("AsyncClient", r" \d+\n.* \d+\n"),
        ("request.update", r"(LENGTH|STOP) after \d+ tokens, seed \d+"),
        ("open_prompt", r"\S"),
        ("Injected", r"\(\d+ tokens after \d+\)"),
        ("except RequestFailed", r"NOT_FOUND CONTEXT_NOT_FOUND False .*did you mean temperature\?"),
        ("LLM(", r"\S"),
    ],
    ids=["client", "asyncio", "events", "pieces", "injection", "errors", "library"],
)
def test_the_examples_of_the_client_run(target: str, containing: str, printed: str) -> None:
    """Most sample without a seed, so that an answer may end at any token."""
    (code,) = blocks(CLIENT, "python", containing)
    assert re.search(printed, run_python(code, target), re.DOTALL)


def test_every_example_of_the_client_is_run() -> None:
    assert len(blocks(CLIENT, "python")) == 7


def test_the_commands_for_batch_files_answer_every_line(target: str, tmp_path: Path) -> None:
    """The blocks follow each other in one directory."""
    commands = blocks(BATCH, "sh")
    assert len(commands) == 3
    for command in commands:
        assert PRINTED_TARGET in command
        run(command.replace(PRINTED_TARGET, target), tmp_path)
    for source, output in (("in.jsonl", "out.jsonl"), ("openai.jsonl", "openai-out.jsonl")):
        num_sampled = len((tmp_path / source).read_text().splitlines())
        answers = (tmp_path / output).read_text().splitlines()
        assert len(answers) == num_sampled
        assert not any('"error":{' in answer for answer in answers)


@pytest.mark.skipif(shutil.which("buf", path=PATH) is None, reason="buf is not installed; `make check` brings it")
def test_the_call_with_buf_streams_text(target: str) -> None:
    (line,) = blocks(GRPC, "sh", "buf curl")
    assert PRINTED_TARGET in line
    answer = run(line.replace(PRINTED_TARGET, target))
    assert '"accepted"' in answer
    assert '"text"' in answer
    assert '"finished"' in answer


def test_the_call_with_grpcurl_is_the_one_with_buf() -> None:
    (buf,), (grpcurl,) = blocks(GRPC, "sh", "buf curl"), blocks(GRPC, "sh", "grpcurl")
    *_, data, url = shlex.split(buf)
    assert shlex.split(grpcurl) == ["grpcurl", "-plaintext", "-d", data, *url.removeprefix("http://").split("/", 1)]


def test_the_commands_exist() -> None:
    pages = README + DEVELOPING + INSTALL + SIZING
    verbs = set(re.findall(r"(?:^ {4}|`)make ([\w-]+)", pages, re.MULTILINE))
    assert {"serve", "test", "check", "bench", "soak", "protos"} <= verbs
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []
    help_text = run(f"{shlex.quote(str(PENSTOCK))} --help")
    commands = set(re.findall(r"(?:^ {4}|`)penstock ([a-z-]+)", pages, re.MULTILINE))
    assert {"serve", "top", "explain", "generate", "doctor"} <= commands
    assert [command for command in commands if not re.search(rf"^  {command} ", help_text, re.MULTILINE)] == []


def flags_of(command: str) -> set[str]:
    """The flags that a command's help lists."""
    return set(re.findall(r"--[a-z][a-z-]*", run(f"{shlex.quote(str(PENSTOCK))} {command} --help")))


def test_every_flag_of_the_page_on_sizing_exists() -> None:
    """A flag belongs to the command before it in the same code, and else to `penstock serve`."""
    used: dict[str, set[str]] = {}
    for line, inline in re.findall(r"^ {4}(.+)$|`([^`\n]+)`", SIZING, re.MULTILINE):
        code = line or inline
        command = re.match(r"penstock ([a-z-]+)", code)
        if command or code.startswith("--"):
            used.setdefault(command[1] if command else "serve", set()).update(re.findall(r"--[a-z][a-z-]*", code))
    assert {"--max-num-seqs", "--drain-delay", "--load-format"} <= used["serve"]
    assert {"--wait", "--resume"} <= used["drain"]
    assert {command: flags - flags_of(command) for command, flags in used.items() if flags - flags_of(command)} == {}


def test_the_page_on_sizing_counts_the_bytes_of_a_token() -> None:
    (line,) = re.findall(r"^ {4}(python3 -c .+)$", SIZING, re.MULTILINE)
    num_bytes = int(run(line, ROOT))
    row = re.search(r"^\| demo \| 6, 2, 64 \| ([\d,]+) \| ([\d,]+) tokens \|$", SIZING, re.MULTILINE)
    assert row is not None
    assert [int(each.replace(",", "")) for each in row.groups()] == [num_bytes, (1 << 30) // num_bytes]


def test_the_badges_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    versions = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    assert f"[Python: {', '.join(versions)}]" in README
    assert f"/python-{'%20%7C%20'.join(versions)}-" in README
    assert f"[Licence: {project['license']}]" in README
    assert f"/licence-{project['license'].replace('-', '--')}-" in README


def test_the_speeds_are_those_of_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| \S+ (\|.*\|) (\S+) ms \|$", README, re.MULTILINE)
    assert len(rows) == 6
    lines = benchmarks.splitlines()
    assert [row for row in rows if not any(row[0] in line and f"| {row[1]} |" in line for line in lines)] == []
    assert (date := re.search(r"measured (\S+) with `make bench-cpu`", README)) is not None
    assert date[1] in benchmarks


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS
