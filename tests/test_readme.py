"""The README's calls, as printed, against a service on the demo model; only the port is another."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PRINTED_TARGET = "127.0.0.1:50051"
PENSTOCK = Path(sys.executable).with_name("penstock")
# buf comes from npm, with `make check`; a system's own will do.
PATH = f"{ROOT / 'node_modules/.bin'}{os.pathsep}{os.environ['PATH']}"


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


def blocks(language: str, containing: str = "") -> list[str]:
    """The README's blocks of code in a language."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return [block for block in found if containing in block]


def run(line: str) -> str:
    """What a shell prints for a line that succeeds."""
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_call_streams_text(target: str) -> None:
    (code,) = blocks("python")
    assert PRINTED_TARGET in code
    assert len(run(shlex.join([sys.executable, "-P", "-c", code.replace(PRINTED_TARGET, target)]))) > 20


@pytest.mark.skipif(shutil.which("buf", path=PATH) is None, reason="buf is not installed; `make check` brings it")
def test_the_call_with_buf_streams_text(target: str) -> None:
    (line,) = blocks("sh", "buf curl")
    assert PRINTED_TARGET in line
    answer = run(line.replace(PRINTED_TARGET, target))
    assert '"accepted"' in answer
    assert '"text"' in answer
    assert '"finished"' in answer


def test_the_call_with_grpcurl_is_the_one_with_buf() -> None:
    (buf,), (grpcurl,) = blocks("sh", "buf curl"), blocks("sh", "grpcurl")
    *_, data, url = shlex.split(buf)
    assert shlex.split(grpcurl) == ["grpcurl", "-plaintext", "-d", data, *url.removeprefix("http://").split("/", 1)]


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^    make (\w+)", README, re.MULTILINE))
    assert {"serve", "test", "check", "bench", "soak", "protos"} <= verbs
    assert [verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []
    help_text = run(f"{shlex.quote(str(PENSTOCK))} --help")
    commands = set(re.findall(r"`penstock (\w+)", README))
    assert [command for command in commands if command not in help_text] == []


def test_the_files_that_it_links_exist() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
