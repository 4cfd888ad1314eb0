"""The CPU library's thread pool, on its own and with orders of events that are rare."""

import shlex
import subprocess
from pathlib import Path

import pytest

from penstock.kernels.cpu import build as build_cpu
from penstock.kernels.cpu.build import CannotBuild, find_compiler

STRESS = Path(__file__).parent / "threads_stress.cpp"
CASES = [(4, 1, 8_000), (6, 3, 3_000), (16, 1, 800), (64, 2, 100)]
"""Threads, NUMA nodes that they are said to be on, and rounds."""


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    """The command of the C++ compiler, with ThreadSanitizer where its programs run."""
    try:
        command = find_compiler()
    except CannotBuild:
        pytest.skip("needs a C++ compiler")
    return command


def build(compiler: list[str], folder: Path, *flags: str) -> Path:
    made = folder / "stress"
    command = [*compiler, "-std=c++17", "-O1", "-g", "-pthread", *flags, f"-I{build_cpu.SOURCES}", str(STRESS)]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return made


def has_thread_sanitizer(compiler: list[str], folder: Path) -> bool:
    """Whether programs that are built with it run: its library may be missing, and some systems place memory where it
    does not expect any."""
    source, made = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() {}\n")
    command = [*compiler, "-fsanitize=thread", str(source), "-o", str(made)]
    return all(subprocess.run(words, capture_output=True, check=False).returncode == 0 for words in (command, [made]))


@pytest.fixture(scope="module")
def stress(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress")
    flags = ["-fsanitize=thread"] if has_thread_sanitizer(compiler, folder) else []
    return build(compiler, folder, *flags)


@pytest.mark.timeout(1800)  # its threads spin: beside other programs they wait for each other's turns
@pytest.mark.parametrize(("num_threads", "num_nodes", "rounds"), CASES)
def test_each_item_is_called_once_and_no_thread_is_late(
    stress: Path, num_threads: int, num_nodes: int, rounds: int
) -> None:
    command = [str(stress), str(num_threads), str(rounds), str(num_nodes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "fine\n"
