"""What every test may count on: no model hub is reached, and a test for a GPU is skipped where there is none."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from without_gpu.interpreter import make_interpreter_fast, treat_nan_as_gpus_do

from penstock.kernels.cpu.bindings import LibraryMissing, library_path, load_library
from penstock.kernels.cpu.build import CannotBuild, find_compiler
from penstock.kernels.reference.onednn_amx import avoid_broken_tiles

if TYPE_CHECKING:
    from penstock.service.auth.identity import Authenticator

# Before anything imports huggingface_hub, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before torch multiplies anything, here or in a process that a test starts.
avoid_broken_tiles()
# Before a module with kernels in Triton is imported, here or there: without a GPU they run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell has its background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Freezes the millions of objects of imported modules and collected tests, so that neither the garbage collector
    nor tests that list its objects scan them again and again."""
    if not torch.cuda.is_available():
        make_interpreter_fast()
        treat_nan_as_gpus_do()
    gc.collect()
    gc.freeze()


@pytest.fixture
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes the same bits for a row wherever it lies in its tile, as a GPU does. On some CPUs, BLAS, which Triton's
    interpreter uses, sums in another order, and torch's sigmoid differs between full AVX-512 vectors and the rest."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        product: np.ndarray = np.einsum("...ik,...kj->...ij", a.astype(dtype), b.astype(dtype))
        return product

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + torch.exp(-x))

    monkeypatch.setattr(np, "matmul", matmul)
    for owner in (torch, torch.Tensor):
        monkeypatch.setattr(owner, "sigmoid", sigmoid)


@pytest.fixture(scope="session")
def cpu_library() -> Path:
    """The CPU library. Without one, a test is skipped where there is no compiler to build it with, and else fails."""
    try:
        load_library()
    except LibraryMissing:
        try:
            find_compiler()
        except CannotBuild:
            pytest.skip("needs a C++ compiler")
        raise
    return library_path()


@pytest.fixture(scope="session")
def load_keys() -> "Callable[[Path], Authenticator]":
    """Makes of a key file what tells a service its callers, as ``penstock serve`` does."""
    from penstock.service.auth.operator_files import OperatorFiles
    from penstock.service.config.serve_config import ServeConfig

    return lambda path: OperatorFiles.load(ServeConfig(api_keys_file=path)).authenticator
