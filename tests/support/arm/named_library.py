"""A pytest plugin for a Python without torch, which the root's conftest.py needs."""

import os
from pathlib import Path

import pytest

from penstock.kernels.cpu.bindings import VARIABLE


@pytest.fixture(scope="session")
def cpu_library() -> Path:
    """The CPU library that the environment names."""
    return Path(os.environ[VARIABLE])
