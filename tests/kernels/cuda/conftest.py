"""Kernels run nowhere where no Triton is."""

from importlib.util import find_spec

import pytest
import torch

# Triton has wheels only for Linux.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    """What the kernels run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
