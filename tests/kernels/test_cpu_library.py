"""The CPU library as a whole: which instruction sets it finds, what it shows, that its types are those that Python
mirrors, that no level's instructions are anywhere but in that level, and that products keep their sums in registers."""

import importlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from ctypes import Structure, sizeof
from enum import IntEnum
from pathlib import Path

import pytest

from penstock.kernels.cpu import bindings as cpu, build as build_cpu
from penstock.kernels.cpu.bindings import LEVELS, find_kernels
from penstock.kernels.cpu.build import CannotBuild, find_compiler

# What the kernel of the operating system calls the instructions that a level is compiled with.
NEEDED = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "neon": {"asimd"},
    "neon_dot": {"asimd", "asimddp"},
    "neon_bf16": {"asimd", "asimddp", "bf16", "i8mm"},
    # Where NEON is always there, it takes the place of this one.
    "generic": {"no flag"} if platform.machine() == "aarch64" else set(),
}
NEEDED["avx_vnni"] = NEEDED["avx2"] | {"avx_vnni"}
NEEDED["avx512_vnni"] = NEEDED["avx512"] | {"avx512_vnni"}
NEEDED["avx512_bf16"] = NEEDED["avx512_vnni"] | {"avx512_bf16"}
NEEDED["amx"] = NEEDED["avx512_bf16"] | {"amx_tile", "amx_bf16", "amx_int8"}

# Functions that a level may call: those of libc, libm and the compiler's own library, compiled for any machine.
PLAIN_C = re.compile(r"_{0,2}[a-z]\w*")


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    """The command of the C++ compiler."""
    try:
        return find_compiler()
    except CannotBuild:
        pytest.skip("needs a C++ compiler")


def run(command: list[str]) -> str:
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Levels ---------------------------------------------------------------------------------------------------------------


def cpu_flags() -> set[str]:
    """What the processor has, as the system says."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


@pytest.mark.skipif("PENSTOCK_EMULATED_LEVELS" in os.environ, reason="/proc/cpuinfo is that of the real machine")
@pytest.mark.skipif(cpu.VARIABLE in os.environ, reason="another build of the library may have AMX in software")
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_is_there_if_the_processor_has_its_instructions(cpu_library: Path, level: str) -> None:
    found = find_kernels(level, cpu_library)
    assert (found is not None) == (cpu_flags() >= NEEDED[level])
    assert found is None or found.name == level.encode()


def test_the_levels_of_an_emulated_machine(cpu_library: Path) -> None:
    """`make emulate` says which levels its machine has."""
    found = [level for level in LEVELS if find_kernels(level, cpu_library)]
    assert found == os.environ.get("PENSTOCK_EMULATED_LEVELS", " ".join(found)).split()
    assert found[-1] == ("neon" if platform.machine() == "aarch64" else "generic")


def test_the_best_level_is_the_default(cpu_library: Path) -> None:
    best = find_kernels(None, cpu_library)
    assert best is not None
    slow = "avx512_bf16" if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else None
    found = [level for level in LEVELS if find_kernels(level, cpu_library)]
    assert best.name.decode() == next(level for level in found if level != slow)


def test_a_library_that_was_not_built_comes_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "library.so")
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    with pytest.raises(cpu.LibraryMissing, match=r"not been built: run make native; .* apt-get install g\+\+"):
        cpu.load_library()


def test_a_library_that_is_not_installed_comes_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(cpu, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(cpu, "PACKAGE", "penstock.no_such_package")
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    with pytest.raises(cpu.LibraryMissing, match=r"not installed: pip install 'penstock-llm\[cpu\]'"):
        cpu.load_library()


def test_an_installed_library_is_used_where_there_are_no_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_library: Path
) -> None:
    package = tmp_path / "installed_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / cpu.LIBRARY.name).symlink_to(cpu_library.resolve())
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cpu, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(cpu, "PACKAGE", package.name)
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    assert cpu.library_path() == package / cpu.LIBRARY.name
    assert find_kernels() is not None


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Loads a library as if it was the first time in this process, the one beside the sources if none is named."""
    cpu._load.cache_clear()

    def load(path: Path) -> None:
        cpu.load_library(path)

    yield load
    cpu._load.cache_clear()


def test_a_library_of_other_sources_is_refused(
    cpu_library: Path, load: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(cpu_library)
    cpu._load.cache_clear()
    monkeypatch.setattr(build_cpu, "digest", lambda: "another")
    monkeypatch.setattr(cpu, "LIBRARY", cpu_library)
    with pytest.raises(cpu.LibraryMissing, match=r"other sources than those .*: run make native"):
        load(cpu_library)
    monkeypatch.setattr(cpu, "LIBRARY", cpu_library.parent / "beside")
    with pytest.raises(cpu.LibraryMissing, match=f"other sources .*: build it again, or unset {cpu.VARIABLE}"):
        load(cpu_library)


def test_a_library_without_a_source_hash_is_refused(
    compiler: list[str], load: Callable[[Path], None], tmp_path: Path
) -> None:
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" void penstock_kernels() {}')
    run([*compiler, "-shared", "-fPIC", str(source), "-o", str(library)])
    with pytest.raises(cpu.LibraryMissing, match="other sources"):
        load(library)


def test_a_wheel_has_no_sources_to_compare_with(
    cpu_library: Path, load: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_cpu, "digest", lambda: "another")
    monkeypatch.setattr(cpu, "SOURCES", tmp_path / "csrc")
    load(cpu_library)


def test_the_documentation_names_the_levels() -> None:
    page = (Path(__file__).parents[2] / "docs/cpu.md").read_text()
    table = page.partition("## Instruction sets")[2].partition("\n\nWith ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(LEVELS)


def test_there_is_no_other_level(cpu_library: Path) -> None:
    assert find_kernels("avx1024", cpu_library) is None


def test_a_table_is_complete(table: cpu.Kernels) -> None:
    assert [name for name, _ in cpu.Kernels._fields_ if not getattr(table, name)] == []


# Types ----------------------------------------------------------------------------------------------------------------


def mirrors() -> dict[str, type[Structure]]:
    """The structures by which Python knows those of the C++ headers, by name."""
    modules = [
        importlib.import_module(f"penstock.kernels.cpu.{file.stem}")
        for file in Path(cpu.__file__).parent.glob("[a-z]*.py")
    ]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {value.__name__: value for value in found if issubclass(value, Structure) and value is not Structure}


def prefixes() -> dict[str, type[IntEnum]]:
    return {"FORMAT": cpu.StorageFormat, "ACTIVATION": cpu.GemmActivation, "OUTPUT": cpu.OutputMode}


@pytest.fixture(scope="module")
def layouts(compiler: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Sizes, offsets and constants as the C++ compiler sees them, by the expression that asks for each."""
    expressions = ["penstock::LANES", "penstock::SPLIT", "penstock::QUERY_TILE"]
    expressions += [f"penstock::{prefix}_{member.name}" for prefix, enum in prefixes().items() for member in enum]
    for name, mirror in mirrors().items():
        expressions.append(f"sizeof(penstock::{name})")
        for field, *_ in mirror._fields_:
            expressions.append(f"offsetof(penstock::{name}, {field})")
            expressions.append(f"sizeof(penstock::{name}::{field})")
    lines = [f'  std::printf("%s=%lld\\n", "{text}", static_cast<long long>({text}));' for text in expressions]
    includes = [
        f'#include "{header.relative_to(build_cpu.SOURCES)}"'
        for header in build_cpu.SOURCES.rglob("*.h")
        if not needs_level(header)
    ]
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text(
        "\n".join(["#include <cstddef>", "#include <cstdio>", *includes, "int main() {", *lines, "}", ""])
    )
    flags = ["-std=c++17", "-pthread", f"-I{build_cpu.SOURCES}", "-o", str(folder / "probe")]
    run([*compiler, *flags, str(folder / "probe.cpp")])
    printed = (line.rpartition("=") for line in run([str(folder / "probe")]).splitlines())
    return {text: int(value) for text, _, value in printed}


def needs_level(header: Path) -> bool:
    """Whether a header is of one instruction set's."""
    text = header.read_text()
    return "namespace PENSTOCK_LEVEL" in text or header.name == "table.h"


def test_python_mirrors_the_structures(layouts: dict[str, int]) -> None:
    assert {"Matrix", "PagedAttention", "SamplingRow", "Kernels"} <= mirrors().keys()
    for name, mirror in mirrors().items():
        assert sizeof(mirror) == layouts[f"sizeof(penstock::{name})"], name
        for field, *_ in mirror._fields_:
            seen = getattr(mirror, field)
            assert seen.offset == layouts[f"offsetof(penstock::{name}, {field})"], f"{name}.{field}"
            assert seen.size == layouts[f"sizeof(penstock::{name}::{field})"], f"{name}.{field}"


def test_python_knows_the_constants(layouts: dict[str, int]) -> None:
    for constant in ("LANES", "SPLIT", "QUERY_TILE"):
        assert getattr(cpu, constant) == layouts[f"penstock::{constant}"], constant
    for prefix, enum in prefixes().items():
        assert {member.name: layouts[f"penstock::{prefix}_{member.name}"] for member in enum} == {
            member.name: member.value for member in enum
        }


# Symbols --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def symbol_reader() -> str:
    """binutils' or LLVM's."""
    found = shutil.which("nm") or shutil.which("llvm-nm")
    return found or pytest.skip("needs nm, which comes with a C++ compiler")


def test_it_shows_nothing_but_its_functions(cpu_library: Path, symbol_reader: str) -> None:
    """Another library's templates could take the place of ours, or ours of theirs."""
    shown = [line.split()[-1] for line in run([symbol_reader, "-D", "--defined-only", str(cpu_library)]).splitlines()]
    assert "penstock_kernels" in shown
    assert [name for name in shown if not name.startswith("penstock_")] == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_keeps_its_instructions_to_itself(
    compiler: list[str], symbol_reader: str, tmp_path: Path, level: str
) -> None:
    """The linker keeps one copy of a function that several objects have, such as a template's: it might be the one with
    instructions that the machine lacks. So a level defines one function, needs no C++ function, and does nothing when
    the library is loaded. Nothing is inlined here, so that everything shows."""
    source, made = build_cpu.SOURCES / f"target/{level}.cpp", tmp_path / "level.o"
    flags = [*build_cpu.COMMON, *build_cpu.level_flags(source.name), "-O0", "-fno-stack-protector"]
    flags.append(f"-I{build_cpu.SOURCES}")
    run([*compiler, *flags, "-c", str(source), "-o", str(made)])
    symbols = [line.split()[-2:] for line in run([symbol_reader, str(made)]).splitlines()]
    own = f"{len(f'level_{level}')}level_{level}"  # its namespace, which no other object can have
    shared = [name for kind, name in symbols if kind not in "tdbrnU" and own not in name]
    assert shared == [f"_ZN8penstock{len(f'kernels_{level}')}kernels_{level}Ev"]
    needed = [name for kind, name in symbols if kind == "U" and name != "_GLOBAL_OFFSET_TABLE_"]
    assert [name for name in needed if not PLAIN_C.fullmatch(name)] == []
    assert [name for _, name in symbols if "_GLOBAL__sub_I" in name or "__cxx_global" in name] == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are the instruction sets of x86-64")
def test_a_compiler_without_the_instructions_makes_an_empty_level(compiler: list[str], tmp_path: Path) -> None:
    """So it is on every other kind of machine."""
    for level in LEVELS[:-1]:
        source = build_cpu.SOURCES / f"target/{level}.cpp"
        text = run([*compiler, "-std=c++17", f"-I{build_cpu.SOURCES}", "-E", "-P", str(source)])
        assert re.search(rf"kernels_{level}\(\) {{ return nullptr; }}", text), level


# Code -----------------------------------------------------------------------------------------------------------------

MULTIPLICATION = re.compile(r"(?:{vex} )?v(fmadd\w+ps|pmaddwd|pmaddubsw|pdpbusd|dpbf16ps)\b")
STACK = r"(-?0x[0-9a-f]+)?\(%r[sb]p\)"
STORED, LOADED = re.compile(rf"%[yz]mm\d+,({STACK})$"), re.compile(rf"({STACK}),%[yz]mm")


def inner_loops(listing: str) -> Iterator[list[str]]:
    """The instructions of each innermost loop without jumps, of at most 200, in a disassembler's listing."""
    found = re.findall(r"^ +([0-9a-f]+):\s+(.*?)\s*$", listing, re.MULTILINE)
    places = {int(address, 16): index for index, (address, _) in enumerate(found)}
    first = 0
    for end, (_, text) in enumerate(found):
        jump = re.match(r"j\w+ +(?:0x)?([0-9a-f]+)\b", text)
        if not jump:
            continue
        begin = places.get(int(jump[1], 16), end)
        if first <= begin < end < begin + 200:
            yield [instruction for _, instruction in found[begin : end + 1]]
        first = end + 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the instructions of x86-64")
@pytest.mark.skipif(cpu.VARIABLE in os.environ, reason="another build of the library may have no symbols")
def test_products_keep_their_sums_in_registers(cpu_library: Path) -> None:
    """A compiler that reorders a loop may need more registers than there are. A sum that waits in memory for its next
    addition makes int8 products a fifth slower with AVX2, and those of bfloat16 a third."""
    reader = shutil.which("objdump") or shutil.which("llvm-objdump")
    if not reader:
        pytest.skip("needs objdump, which comes with a C++ compiler")
    listing = run([reader, "-d", "--no-show-raw-insn", str(cpu_library)])
    functions = re.findall(r"^\w+ <(_ZN\w*(?:multiply_tile|product)\w*)>:\n((?:.+\n)*)", listing, re.MULTILINE)
    busy = [
        (name, loop)
        for name, body in functions
        for loop in inner_loops(body)
        if sum(bool(MULTIPLICATION.match(text)) for text in loop) >= 12
    ]
    for level in ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16"):
        own = f"_ZN{len(f'level_{level}')}level_{level}"
        assert any(name.startswith(own) for name, _ in busy), level
    for name, loop in busy:
        stored = {match[1] for text in loop if (match := STORED.search(text))}
        loaded = {match[1] for text in loop if (match := LOADED.search(text))}
        assert len(stored & loaded) <= 1, "\n".join([name, *loop])


@pytest.mark.parametrize(
    ("version", "kept", "left_out"),
    [("gcc (Debian) 12.2.0", "-fno-tree-ter", "-enable-misched=false"),
     ("clang version 14.0.6", "-enable-misched=false", "-fno-tree-ter")],
)  # fmt: skip
def test_each_compiler_gets_its_own_option_for_that(tmp_path: Path, version: str, kept: str, left_out: str) -> None:
    compiler, log = tmp_path / "c++", tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\necho "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    compiler.chmod(0o755)
    build_cpu.build(tmp_path, compiler=[str(compiler)], machine="x86_64")
    compiled = next(line for line in log.read_text().splitlines() if "avx2.cpp" in line)
    assert kept in compiled
    assert left_out not in compiled
