"""Opens the ports at which rank 0 waits for the ranks of other hosts, and reports them to the service."""

import socket

import msgspec

from penstock.models.executor.wire import Channel, FrameKind
from penstock.scheduler.worker_config import MeetingPorts, WorkerConfig


def open_meeting(config: WorkerConfig, channel: Channel) -> WorkerConfig:
    """Returns the config of rank 0 with the sockets that listen; that of other ranks unchanged, and of ranks that meet
    in a directory. Raises OSError."""
    meeting = config.meeting
    is_first = config.tensor_parallel_rank == config.pipeline_parallel_rank == 0
    if not is_first or meeting.directory or not meeting.host:
        return config
    store_descriptor, store_port = _listen(meeting.host) if config.tensor_parallel_size > 1 else (-1, 0)
    stage_descriptor, stage_port = _listen(meeting.host) if config.pipeline_parallel_size > 1 else (-1, 0)
    channel.send(FrameKind.PORTS, MeetingPorts(store_port=store_port, stage_port=stage_port))
    opened = msgspec.structs.replace(
        meeting,
        store_port=store_port,
        store_descriptor=store_descriptor,
        stage_port=stage_port,
        stage_descriptor=stage_descriptor,
    )
    return msgspec.structs.replace(config, meeting=opened)


def _listen(host: str) -> tuple[int, int]:
    """Listens on any free port. Returns the socket's descriptor, whose owner is the caller, and the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port: int = listener.getsockname()[1]
    return listener.detach(), port
