"""Builds the CPU library from ``csrc`` with a C++ compiler. ``make native`` and ``make wheels`` run it. By hand:

    python kernels/cpu/build.py                               the library, in this folder
    python kernels/cpu/build.py --out DIR --sanitize          one that stops at the first undefined behaviour
    python kernels/cpu/build.py --out DIR --software          one whose levels "amx" and "avx_vnni" need only
                                                              "avx512_bf16" and "avx2", and are slow

Imports nothing else from penstock, since it runs before the package is installed.
"""

import argparse
import concurrent.futures
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libpenstock_cpu.so"

COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast",
          "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes",
          "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # gcc 12 finds some in its own AVX512 headers
          "-Wno-unknown-warning-option",  # clang lacks some of these
          "-pthread")  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX_VNNI = "-mavxvnni"
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
AVX512_VNNI = (*AVX512, "-mavx512vnni")
AVX512_BF16 = (*AVX512_VNNI, "-mavx512bf16")
ARMV8_2, ARMV8_2_OF_ZIG = "-march=armv8.2-a", "-mcpu=generic"  # Zig names processors only
LEVEL_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2.cpp": AVX2,
        "avx_vnni.cpp": (*AVX2, AVX_VNNI),
        "avx512.cpp": AVX512,
        "avx512_vnni.cpp": AVX512_VNNI,
        "avx512_bf16.cpp": AVX512_BF16,
        "amx.cpp": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {
        "neon_dot.cpp": (f"{ARMV8_2}+dotprod",),
        "neon_bf16.cpp": (f"{ARMV8_2}+dotprod+bf16+i8mm",),
    },
}
"""Compiler flags of the sources that use particular instruction sets, by machine. On other machines these sources
compile to nothing."""
CLANG_IN_ORDER = ("-mllvm", "-enable-misched=false")
"""Without it clang reads the inputs of all rows before it multiplies them, and moves sums and inputs to memory."""
GCC_IN_ORDER = dict.fromkeys(("avx2.cpp", "avx_vnni.cpp"), ("-fno-tree-ter",))
"""Without it gcc multiplies all rows before it adds the products, and keeps half of the sums in memory. The levels with
32 registers do not need it."""
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
SOFTWARE = ("-DPENSTOCK_SOFTWARE_TILES", "-DPENSTOCK_SOFTWARE_DOT", "-O1")
"""Only tests use it, and -O1 compiles in half the time."""
# The version script hides the standard library's templates, which -fvisibility leaves visible. Missing symbols fail at
# link time, not at run time; a sanitizer's symbols come from a library that is loaded first.
LINK = ("-shared", "-pthread", f"-Wl,--version-script={SOURCES / 'core/exports.map'}")
COMPLETE = "-Wl,-z,defs"

INSTALL_ONE = "install one (Debian, Ubuntu: apt-get install g++), then run make native"
SEE_ALL = "run make native to see its full output"


class CannotBuild(Exception):
    """There is no C++ compiler, or there are no sources, or the compiler failed with ``output``."""

    def __init__(self, what: str, remedy: str, output: str = "") -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy, self.output = what, remedy, output


def find_compiler() -> list[str]:
    """The compiler's command: $CXX, or the first of c++, g++ and clang++ that is installed. Raises CannotBuild."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise CannotBuild(f"there is no C++ compiler{f' {named[0]}, which CXX names' if named else ''}", INSTALL_ONE)


def build(
    folder: Path,
    *,
    compiler: Sequence[str] = (),
    machine: str = platform.machine(),
    sanitize: bool = False,
    software: bool = False,
    levels: Collection[str] | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Compiles and links all sources for a machine, by default with the installed compiler; returns the library's path.
    Without ``levels`` it has all instruction sets; else those whose source is not among them are left out, except the
    one that needs no flags. With ``software``, AMX and AVX-VNNI are emulated. ``flags`` are further ones of
    the compiler. Raises CannotBuild."""
    compiler = compiler or find_compiler()
    sources = sorted(SOURCES.rglob("*.cpp"))
    if not sources:
        raise CannotBuild("the sources are missing", "they are in a checkout and in the source distribution")
    target = folder / LIBRARY
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        extra = SANITIZERS if sanitize else ()
        clang = _is_clang(compiler)
        common = [
            *compiler,
            *COMMON,
            f"-I{SOURCES}",
            f'-DPENSTOCK_SOURCES="{digest()}"',
            *(SOFTWARE if software else ()),
            *(CLANG_IN_ORDER if clang else ()),
            *flags,
        ]
        commands = []
        for source, made in zip(sources, objects, strict=True):
            wanted = level_flags(source.name, machine) if levels is None or source.name in levels else ()
            if software:  # otherwise the compiler could use the instruction by itself
                wanted = tuple(flag for flag in wanted if flag != AVX_VNNI)
            if not clang:
                wanted = (*wanted, *GCC_IN_ORDER.get(source.name, ()))
            if "ziglang" in compiler:
                wanted = tuple(flag.replace(ARMV8_2, ARMV8_2_OF_ZIG) for flag in wanted)
            commands.append([*common, *wanted, *extra, "-c", str(source), "-o", str(made)])
        # The sources in target/ take the longest, so they go first.
        commands.sort(key=lambda command: f"{os.sep}target{os.sep}" not in command[-3])
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / LIBRARY
        _run([*compiler, *LINK, *(extra or (COMPLETE,)), *map(str, objects), "-o", str(linked)])
        # Replaced atomically: a worker that starts meanwhile loads either the old or the new library.
        arrived = target.with_suffix(f".{os.getpid()}")
        shutil.copy(linked, arrived)
        arrived.replace(target)
    return target


def build_if_possible(folder: Path) -> Path | None:
    """Builds the library in a folder if a source is newer. Without a working compiler it removes the stale library and
    prints a warning instead of failing."""
    target = folder / LIBRARY
    if is_current(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return build(folder)
    except CannotBuild as error:
        target.unlink(missing_ok=True)  # a stale library, not built from these sources
        print(
            f"{error.output}penstock: WARNING: no CPU library was built ({error.what}), so penstock serve will compute "
            f"in plain torch, many times slower: {error.remedy}",
            file=sys.stderr,
            flush=True,
        )
        return None


def source_files() -> list[Path]:
    """The library's sources, and this script, since it has the compiler flags."""
    return [*sorted(path for path in SOURCES.rglob("*") if path.is_file()), Path(__file__)]


def digest() -> str:
    """The digest of all source files. A library contains the digest of the sources that it was built from."""
    whole = hashlib.sha256()
    for source in source_files():
        whole.update(f"{source.name} {source.stat().st_size}\n".encode())
        whole.update(source.read_bytes())
    return whole.hexdigest()


def is_current(library: Path) -> bool:
    """Whether the library exists and no source is newer."""
    if not library.exists():
        return False
    made = library.stat().st_mtime_ns
    return all(source.stat().st_mtime_ns <= made for source in source_files())


def level_flags(name: str, machine: str = platform.machine()) -> tuple[str, ...]:
    """The compiler flags for a source's instruction set."""
    return LEVEL_FLAGS.get({"AMD64": "x86_64"}.get(machine, machine), {}).get(name, ())


def _is_clang(compiler: Sequence[str]) -> bool:
    return "clang" in _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"{command[0]} cannot be run ({error.strerror})", INSTALL_ONE) from error
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed", SEE_ALL, f"{shlex.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")
    return done.stdout


def main() -> None:
    """Builds the library from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="the folder for the library")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    parser.add_argument("--software", action="store_true", help="emulate AMX and AVX-VNNI, for tests")
    parser.add_argument("--if-possible", action="store_true", help="only if a source is newer; a failure is a warning")
    arguments = parser.parse_args()
    if arguments.if_possible:
        build_if_possible(arguments.out)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        print(build(arguments.out, sanitize=arguments.sanitize, software=arguments.software))
    except CannotBuild as error:
        sys.exit(f"{error.output}no library was built: {error}")


if __name__ == "__main__":
    main()
