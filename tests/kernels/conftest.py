"""The CPU library's tables of kernels, one for each instruction set that this machine has."""

from pathlib import Path

import pytest

from penstock.kernels.cpu import LEVELS, Kernels, find_kernels


@pytest.fixture(params=LEVELS)
def table(request: pytest.FixtureRequest, cpu_library: Path) -> Kernels:
    """Every instruction set in turn. PENSTOCK_CPU_LIBRARY names another build of the library to test."""
    found = find_kernels(request.param, cpu_library)
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    return found
