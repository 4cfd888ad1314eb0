"""Builds the CPU library from ``csrc`` with whatever C++ compiler there is. Run by ``pip install``; by hand:

    python kernels/build_cpu.py                               the library, in this folder
    python kernels/build_cpu.py --out DIR --sanitize          one that stops at the first undefined behaviour

Imports nothing of ours, since it runs before anything is installed.
"""

import argparse
import concurrent.futures
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libpenstock_cpu.so"

COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast",
          "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes",
          "-pthread")  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
LEVEL_FLAGS = {
    "level_avx2.cpp": AVX2,
    "level_avx512.cpp": AVX512,
    "level_avx512_bf16.cpp": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
}
"""Of the sources with instructions of their own; other machines than x86-64 build them empty."""
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")


class NoCompiler(Exception):
    """There is no C++ compiler, or it does not work."""


def find_compiler() -> list[str]:
    """The command of the compiler: $CXX, or the first of c++, g++ and clang++. Raises NoCompiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise NoCompiler("no C++ compiler: install g++ (Debian: apt-get install g++), or name one in CXX")


def build(folder: Path, *, sanitize: bool = False) -> Path:
    """Compiles every source and links them; returns the library's path. Raises NoCompiler with what went wrong."""
    compiler = find_compiler()
    target = folder / LIBRARY
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        extra = SANITIZERS if sanitize else ()
        commands = [
            [*compiler, *COMMON, *_level_flags(source.name), *extra, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / LIBRARY
        _run([*compiler, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(linked)])
        # In one move: a worker that starts meanwhile loads the old library or the new one.
        arrived = target.with_suffix(f".{os.getpid()}")
        shutil.copy(linked, arrived)
        arrived.replace(target)
    return target


def _level_flags(name: str) -> tuple[str, ...]:
    return LEVEL_FLAGS.get(name, ()) if platform.machine() in ("x86_64", "AMD64") else ()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompiler(f"{shlex.join(command)}\n{done.stderr.strip()}")
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")


def main() -> None:
    """Builds by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder for the library")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(build(arguments.out, sanitize=arguments.sanitize))


if __name__ == "__main__":
    main()
