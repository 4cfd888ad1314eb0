"""Ranks that communicate over torch.distributed: NCCL between GPUs, Gloo between CPUs. All of them run on one host.

They meet through a file in a directory that only the service's user can enter, so no other user can join them or keep
them from meeting. Their data goes directly between GPUs, through shared memory, or over the loopback interface, and
never leaves the host. On the loopback interface Gloo and NCCL open ports without authentication. Nothing is pickled.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch.nn import functional

from penstock.models.backends.tensor_parallel import ALONE, PeerLost, TensorParallel
from penstock.scheduler.worker_config import WorkerConfig

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Otherwise they listen on the address that the host's name resolves to."""

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another, which may still be loading. If one hangs, the service ends all ranks earlier."""


class Distributed:
    """A rank in the process's default group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    def all_reduce(self, x: Tensor) -> None:
        """Sums in the dtype of ``x``. Beyond two ranks, a sum's last bits may depend on its place in ``x``."""
        with _peers():
            distributed.all_reduce(x)

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """Gathers once; columns are padded to equal parts on the way."""
        each = -(-num_columns // self.size)
        part = functional.pad(x, (0, each - x.shape[1]))
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _peers():
            distributed.all_gather(parts, part)
        return torch.cat(parts, dim=1)[:, :num_columns].contiguous()

    def least(self, number: int) -> int:
        """Returns the smallest number of all ranks; numbers are below 2^63."""
        least = torch.tensor(number, dtype=torch.int64, device=self._device)
        with _peers():
            distributed.all_reduce(least, distributed.ReduceOp.MIN)
        return int(least)


def join(config: WorkerConfig) -> TensorParallel:
    """Joins the group that the config names and waits for the other ranks. A process's backend calls it once, after
    everything that one rank can check on its own. Raises PeerLost."""
    if config.tensor_parallel_size == 1:
        return ALONE
    device = torch.device(config.device)
    rank, size = config.tensor_parallel_rank, config.tensor_parallel_size
    os.environ.update(LOOPBACK)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    with _peers():
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{config.meeting.directory}/ranks",
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if on_gpu else None,
        )
    return Distributed(rank, size, device)


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turns the RuntimeError of any failure between the ranks into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from error
