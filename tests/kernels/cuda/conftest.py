"""Kernels run nowhere where no Triton is."""

from importlib.util import find_spec

import pytest
import torch

# Triton has wheels only for Linux.
collect_ignore_glob = [] if find_spec("triton") else ["*.py"]


@pytest.fixture
def device() -> torch.device:
    """What the kernels run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def launches_are_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a kernel that reads past the end of a tensor, or depends on the order of programs, fails too."""
    if not torch.cuda.is_available():
        from without_gpu.hostile_launches import make_hostile

        make_hostile(monkeypatch)
