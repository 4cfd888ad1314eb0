"""Runs the kernels' tests on emulated 64-bit Arm processors, with an arm64 Python and numpy. Examples:

    python -P tests/support/arm/emulator.py cortex-a72 tests/kernels/test_cpu_products.py -k int8

The programs are unpacked into ``build/arm64`` from the registries of Debian and PyPI. Nothing is installed. What needs
torch is left out, or compared with what torch chose on this machine (``torch_tokens.py``).
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.kernels.cpu import build as build_cpu

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build/arm64"
TREE, SITE = FOLDER / "debian", FOLDER / "site"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
PACKAGES = ("python3", "libstdc++6")
MODULES = ("numpy", "msgspec", "psutil", "pytest", "pytest-timeout")
PROCESSORS = {
    "cortex-a72": ("neon",),
    "neoverse-n1": ("neon_dot", "neon"),
    "max": ("neon_bf16", "neon_dot", "neon"),
}
"""Emulated processors, and the instruction sets that the library has for each."""


class Unavailable(Exception):
    """A tool or a registry is missing."""


def prepare(*, quick: bool = False) -> Path:
    """Makes the tree of arm64 programs and the library for it, unless they are there; returns the library's path. A
    quick build takes less time to compile. One process at a time. Raises Unavailable."""
    for tool in (COMPILER, EMULATOR, "apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Unavailable(f"{tool} is missing (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _unpack_python()
        folder = FOLDER / ("quick" if quick else "full")
        library = folder / build_cpu.LIBRARY
        if not build_cpu.is_current(library):
            folder.mkdir(exist_ok=True)
            build_cpu.build(folder, compiler=[COMPILER], machine="aarch64", flags=["-O1"] if quick else ())
    return library


def command(processor: str, *arguments: str) -> list[str]:
    """The command line of the emulated Python."""
    [python] = TREE.glob("usr/bin/python3.[0-9]*[0-9]")
    return [EMULATOR, "-cpu", processor, "-L", str(TREE), str(python), "-P", *arguments]


def environment(processor: str, library: Path) -> dict[str, str]:
    """The variables of the emulated Python. There is no compiler for it."""
    return {
        **os.environ,
        "CXX": "/none",
        "OPENBLAS_NUM_THREADS": "1",
        "PENSTOCK_CPU_LIBRARY": str(library),
        "PENSTOCK_EMULATED_LEVELS": " ".join(PROCESSORS[processor]),
        "PYTHONPATH": f"{SITE}{os.pathsep}{Path(__file__).parents[1]}",
    }


def pytest_command(processor: str, *arguments: str) -> list[str]:
    """The command line that runs tests of kernels. The root's conftest.py needs torch, so it is not read."""
    options = ["-c", os.devnull, f"--rootdir={ROOT}", f"--confcutdir={ROOT / 'tests/kernels'}"]
    options += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "arm.named_library", "--timeout=0", "-q"]
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "-m", "not soak"]
    return command(processor, "-m", "pytest", *options, *arguments)


def _unpack_python() -> None:
    complete, wanted = FOLDER / "complete", " ".join([*PACKAGES, *MODULES])
    if complete.exists() and complete.read_text() == wanted:
        return
    for folder in (TREE, SITE, FOLDER / "apt"):
        shutil.rmtree(folder, ignore_errors=True)
    archives = _download_python(FOLDER / "apt")
    for archive in archives:
        _run("dpkg-deb", "-x", str(archive), str(TREE))
    if not (TREE / "lib").exists():  # of releases whose packages have everything in /usr
        (TREE / "lib").symlink_to("usr/lib")
    version = os.readlink(TREE / "usr/bin/python3").removeprefix("python")
    tags = [word for glibc in (17, 27, 28) for word in ("--platform", f"manylinux_2_{glibc}_aarch64")]
    tags += ["--platform", "manylinux2014_aarch64", "--implementation", "cp", "--python-version", version]
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", str(SITE), "--only-binary=:all:", *tags,
         "--constraint", str(ROOT / "constraints.txt"), *MODULES)  # fmt: skip
    (SITE / "penstock").symlink_to(ROOT)
    shutil.rmtree(FOLDER / "apt")
    complete.write_text(wanted)


def _download_python(folder: Path) -> list[Path]:
    """Downloads the packages and what they need, libc too, with an apt that knows no installed packages."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
        "Dir::State": str(folder / "state"),
        "Dir::State::status": str(folder / "status"),
        "Dir::Cache": str(folder / "cache"),
    }
    words = [f"-o{name}={value}" for name, value in options.items()]
    _run("apt-get", *words, "-qq", "update")
    _run("apt-get", *words, "-qq", "--yes", "--download-only", "install", *PACKAGES)
    return sorted((folder / "cache/archives").glob("*.deb"))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{words[0]} failed: {done.stderr[-2000:]}")


def main(processor: str, arguments: Sequence[str]) -> int:
    """Runs pytest with these arguments on a processor."""
    library = prepare()
    done = subprocess.run(
        pytest_command(processor, *arguments), env=environment(processor, library), cwd=ROOT, check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
