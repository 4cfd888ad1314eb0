"""The CPU library's tables of kernels, one for each instruction set that this machine has."""

import fcntl
import platform
from pathlib import Path

import pytest

from penstock.kernels.cpu import build as build_cpu
from penstock.kernels.cpu.bindings import LEVELS, Kernels, find_kernels
from penstock.kernels.cpu.build import CannotBuild


def is_of_machine(level: str) -> bool:
    """Whether some machines of this kind have an instruction set."""
    return level.startswith("neon") == (platform.machine() == "aarch64")


@pytest.fixture(scope="session")
def software_tiles(pytestconfig: pytest.Config) -> Path:
    """A library whose level "amx" needs nothing but avx512_bf16: built if a source is newer."""
    folder = pytestconfig.rootpath / "build" / "software-tiles"
    library = folder / build_cpu.LIBRARY
    if build_cpu.is_current(library):
        return library
    try:
        build_cpu.find_compiler()
    except CannotBuild:
        pytest.skip("needs a C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's other process may be building it
        if build_cpu.is_current(library):
            return library
        return build_cpu.build(folder, software_tiles=True, levels=["amx.cpp"])


@pytest.fixture(params=[level for level in LEVELS if is_of_machine(level)])
def table(request: pytest.FixtureRequest, cpu_library: Path) -> Kernels:
    """Every instruction set of this kind of machine in turn, that of AMX in software where there is none.
    PENSTOCK_CPU_LIBRARY names another build of the library to test."""
    found = find_kernels(request.param, cpu_library)
    if found is None and request.param == "amx" and find_kernels("avx512_bf16", cpu_library):
        found = find_kernels("amx", request.getfixturevalue("software_tiles"))
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    return found
