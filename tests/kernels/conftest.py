"""The CPU library's tables of kernels, one for each instruction set that this machine has."""

import fcntl
import platform
from pathlib import Path

import pytest

from penstock.kernels.cpu import build as build_cpu
from penstock.kernels.cpu.bindings import LEVELS, Kernels, find_kernels
from penstock.kernels.cpu.build import CannotBuild

IN_SOFTWARE = {"amx": "avx512_bf16", "avx_vnni": "avx2"}
"""Levels that are tested where their own instructions are missing, and the level that has all others."""


def is_of_machine(level: str) -> bool:
    """Whether some machines of this kind have an instruction set."""
    return level.startswith("neon") == (platform.machine() == "aarch64")


def build_in_software(level: str, folder: Path) -> Path:
    """Returns a library computing in software what this machine lacks for a level; builds it if a source is newer."""
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
        return build_cpu.build(folder, software=True, levels=[f"{level}.cpp"])


@pytest.fixture(params=[level for level in LEVELS if is_of_machine(level)])
def table(request: pytest.FixtureRequest, cpu_library: Path) -> Kernels:
    """Every instruction set of this kind of machine in turn, some in software where the processor lacks them.
    PENSTOCK_CPU_LIBRARY names another build of the library to test."""
    found = find_kernels(request.param, cpu_library)
    if found is None and request.param in IN_SOFTWARE and find_kernels(IN_SOFTWARE[request.param], cpu_library):
        folder = request.config.rootpath / "build" / "software" / request.param
        found = find_kernels(request.param, build_in_software(request.param, folder))
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    return found
