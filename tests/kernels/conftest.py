"""The CPU library's tables of kernels, one for each instruction set that this machine has."""

import os
from pathlib import Path

import pytest

from penstock.kernels.cpu import LEVELS, LIBRARY, Kernels, find_kernels


@pytest.fixture(params=LEVELS)
def table(request: pytest.FixtureRequest) -> Kernels:
    """Every instruction set in turn. PENSTOCK_CPU_LIBRARY names another build of the library to test."""
    found = find_kernels(request.param, Path(os.environ.get("PENSTOCK_CPU_LIBRARY", LIBRARY)))
    if found is None:
        pytest.skip(f"this machine has no {request.param}")
    return found
