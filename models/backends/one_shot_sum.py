"""Sums of few numbers over the GPUs of one host, in one kernel: every rank reads all ranks' numbers, in memory that
they share (torch's symmetric memory). NCCL passes them on in several steps, which takes longer for a few numbers.

Every GPU adds up the ranks in the same order, so all of them get the same bits, wherever a number is in the tensor. A
CUDA graph can capture it. It has been tested only with fakes, and has not run on GPUs yet.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 10
"""The size of the largest sum. For larger ones NCCL, which moves fewer bytes, is expected to be faster; this has not
been measured yet."""
DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that torch's kernel adds up."""
ALIGNMENT = 16
"""The number of bytes that the kernel reads at a time."""


class OneShotSum:
    """The memory that the ranks of the process's default group share, and sums in it. One sum at a time."""

    def __init__(self, device: torch.device) -> None:
        """Allocates the memory and exchanges it with the other ranks, which do the same: it must exist before a graph
        captures a sum. Raises RuntimeError."""
        self._group_name, memory = _group_name(), _symmetric_memory()
        self._buffers: dict[torch.dtype, Tensor] = {}
        for dtype in DTYPES:
            self._buffers[dtype] = memory.empty(MAX_BYTES // dtype.itemsize, dtype=dtype, device=device)
            memory.rendezvous(self._buffers[dtype], self._group_name)

    def can_add(self, x: Tensor) -> bool:
        """Whether ``add_ranks`` can add ``x``; the answer is the same on all ranks."""
        return x.dtype in DTYPES and x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0

    def add_ranks(self, x: Tensor) -> None:
        """Replaces ``x``, contiguous, by the sum of all ranks' ``x``, in the dtype of ``x``."""
        flat = x.view(-1)
        shared = self._buffers[x.dtype][: len(flat)]
        # The kernel of the sum before has ended only when every rank had read the memory.
        shared.copy_(flat)
        torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", self._group_name, flat)


def join_one_shot(
    device: torch.device, rank: int, size: int, folder: str, least: Callable[[int], int]
) -> OneShotSum | None:
    """Returns what adds few numbers of ``size`` ranks, whose GPUs follow one another; None if NCCL has to. All ranks
    call this together and get the same. ``device`` is that of this rank. ``folder`` is one that only the service's user
    can enter, for the sockets through which ranks exchange the memory; empty if they are on several hosts. ``least`` is
    that of ``TensorParallel``."""
    reason = None if folder else "the ranks are on several hosts"
    reason = reason or _missing_link(device.index - rank, size)
    made: OneShotSum | None = None
    # So that no rank waits for one that cannot.
    if least(int(reason is None)):
        try:
            with _sockets_in(folder):
                made = OneShotSum(device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    if least(int(made is not None)):
        logger.info("sums of up to %d KiB over %d GPUs: one kernel, in memory that they share", MAX_BYTES >> 10, size)
        return made
    logger.info("sums over %d GPUs: NCCL for all sizes, since %s", size, reason or "another rank cannot share memory")
    return None


def _missing_link(first: int, size: int) -> str | None:
    """Returns why GPUs, from ``first`` on, cannot share memory; None if they can."""
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
        return f"torch {torch.__version__} has no symmetric memory"
    links, gpus = nvlinks(), range(first, first + size)
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    missing = [pair for pair in pairs if max(pair) >= len(links) or not links[pair[0]][pair[1]]]
    return f"GPUs {missing[0][0]} and {missing[0][1]} have no NVLink between them" if missing else None


def nvlinks() -> list[list[int]]:
    """Returns the number of NVLinks between each two GPUs that this process sees; empty if it cannot be found."""
    from torch._C._autograd import DeviceType

    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)  # noqa: SLF001 - it has no public name
    try:
        return [] if detect is None else detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:
        return []


def _group_name() -> str:
    world = distributed.group.WORLD
    assert world is not None, "the ranks have not met"
    return str(world.group_name)


def _symmetric_memory() -> Any:
    return import_module("torch.distributed._symmetric_memory")


@contextmanager
def _sockets_in(folder: str) -> Iterator[None]:
    """Has torch make its sockets in a folder: it makes them in TMPDIR, which other users may share."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
