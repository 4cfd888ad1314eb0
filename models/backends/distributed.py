"""Ranks that communicate over torch.distributed: NCCL between GPUs, Gloo between CPUs.

On one host they meet through a file in a directory that only the service's user can enter, so no other user can join
them or keep them from meeting. Their data goes directly between GPUs, through shared memory, or over the loopback
interface, and never leaves the host. On the loopback interface Gloo and NCCL open ports without authentication.

On several hosts they meet at a TCPStore in rank 0's process. The store, Gloo and NCCL have neither keys nor TLS, so the
network between the hosts must be private. Nothing is pickled.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them too, but not for mypy
from torch.nn import functional

from penstock.models.backends.one_shot_sum import OneShotSum, join_one_shot
from penstock.models.backends.tensor_parallel import ALONE, PeerLost, TensorParallel
from penstock.scheduler.worker_config import Meeting, WorkerConfig

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without them, Gloo and NCCL listen on the address that the host's name resolves to."""
LOOPBACK = "lo"

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another on the same host, which may still be loading. If one hangs, the service ends all
ranks earlier."""
MEETING_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for those of other hosts to meet it: they import torch meanwhile."""
LOADING_TIMEOUT = timedelta(seconds=600)
"""How long it waits for them until the first sum, since their disks may be slower."""
STEP_TIMEOUT = timedelta(seconds=60)
"""How long it waits for them in a step. The service finds a lost host within seconds; this is for a host that lives
and whose data does not arrive."""


class Distributed:
    """A rank in the process's default group."""

    def __init__(self, rank: int, size: int, device: torch.device, step_timeout: timedelta | None = None) -> None:
        """``step_timeout`` applies from the first sum on."""
        self.rank = rank
        self.size = size
        self._device = device
        self._step_timeout = step_timeout
        self.one_shot: OneShotSum | None = None
        """Adds small sums, if the ranks' devices can do that."""

    def all_reduce(self, x: Tensor) -> None:
        """Sums in the dtype of ``x``. Beyond two ranks, a sum's last bits may depend on its place in ``x``, unless
        ``one_shot`` adds."""
        if self.one_shot is not None and self.one_shot.can_add(x):
            self.one_shot.add_ranks(x)
            return
        with _peers():
            distributed.all_reduce(x)
        if self._step_timeout is not None:
            distributed.distributed_c10d._set_pg_timeout(self._step_timeout)  # noqa: SLF001 - it has no public name
            self._step_timeout = None

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
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    on_one_host = bool(config.meeting.directory)
    _choose_interface(config.meeting)
    stage = f"stage-{config.pipeline_parallel_rank}"
    with _peers():
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{config.meeting.directory}/ranks-{stage}" if on_one_host else None,
            store=None if on_one_host else PrefixStore(stage, _store(config.meeting)),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT if on_one_host else LOADING_TIMEOUT,
            device_id=device if on_gpu else None,
        )
    made = Distributed(rank, size, device, None if on_one_host else STEP_TIMEOUT)
    if on_gpu:
        made.one_shot = join_one_shot(device, rank, size, config.meeting.directory, made.least)
    return made


def _store(meeting: Meeting) -> TCPStore:
    """Connects to the store at which the ranks of several hosts meet, which is in rank 0's process."""
    is_master = meeting.store_descriptor >= 0
    return TCPStore(
        meeting.host,
        meeting.store_port,
        is_master=is_master,
        timeout=MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=meeting.store_descriptor if is_master else None,
    )


def _choose_interface(meeting: Meeting) -> None:
    """Chooses the network interface of Gloo and NCCL. Unless the meeting names one, variables that the operator has set
    are kept on several hosts."""
    if meeting.directory or meeting.interface:
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, meeting.interface or LOOPBACK))
        return
    interface = interface_to(meeting.host)
    if interface:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)


def interface_to(host: str) -> str:
    """Returns the network interface that routes to a host; empty if it cannot be found."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(each.address.split("%")[0] == own for each in found)), "")


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turns the RuntimeError of any failure between the ranks into PeerLost."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from error
