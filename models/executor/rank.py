"""What a group of workers needs of a rank's worker process, whether on this host or on another one, and of the other
hosts."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import StepResult
from penstock.scheduler.worker_config import Meeting, MeetingPorts, WorkerConfig, WorkerFacts


class RankWorker(Protocol):
    """The worker process of a rank. See ``Executor``."""

    async def start(
        self, meeting: Meeting | None = None, on_ports: Callable[[MeetingPorts], object] | None = None
    ) -> WorkerFacts:
        """Starts it and waits until it has loaded its part of the model. ``meeting`` replaces that of the config.
        ``on_ports`` is called with the ports at which rank 0 waits for the others. Raises ExecutorError."""

    def submit_frame(self, frame: bytes) -> None:
        """Sends an encoded plan. Raises ExecutorError if the worker is known to be gone."""

    def results(self) -> AsyncIterator[StepResult]:
        """Yields its results; raises ExecutorError when it is gone."""

    def kill(self, why: str) -> None:
        """Ends it at once."""

    async def stop(self) -> None:
        """Ends it and waits for it; safe to call twice, and at any time."""


class OtherHosts(Protocol):
    """The hosts that run ranks besides this one."""

    @property
    def num_nodes(self) -> int:
        """The number of hosts, with this one."""

    async def gather(self) -> str:
        """Waits until all have joined. Returns this host's address, as they reach it. Raises ExecutorError with the
        hosts that are missing, and why."""

    def worker(self, config: WorkerConfig, rank: int) -> RankWorker:
        """Returns the worker of a rank on one of them. The parts of the config that depend on the host, such as paths
        and threads, are chosen there."""


def settled(config: WorkerConfig, facts: WorkerFacts) -> WorkerConfig:
    """Returns the config of the worker that replaces one with these facts. It keeps their choices, and does not log
    again why the best backend is not available."""
    return msgspec.structs.replace(
        config,
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
        backend=facts.backend,
        stage_layers=facts.stage_layers,
        frees_windows=facts.num_window_groups > 0,
        measures_steps=False,
    )


def same_facts(first: WorkerFacts | None, facts: WorkerFacts, *, is_elsewhere: bool = False) -> WorkerFacts:
    """Returns the facts of the first worker, or those of a new one if it is the first. Raises ExecutorError if they
    differ, except for measurements. ``is_elsewhere``: the new one may be on a host with another number of threads."""
    if first is None:
        return facts
    facts = msgspec.structs.replace(
        facts, copy_us_per_block=first.copy_us_per_block, measured_steps=first.measured_steps
    )
    if is_elsewhere:
        facts = msgspec.structs.replace(facts, num_threads=first.num_threads)
    if facts == first:
        return facts
    now, then = msgspec.structs.asdict(facts), msgspec.structs.asdict(first)
    differences = [f"{name} is {now[name]} and was {then[name]}" for name in now if now[name] != then[name]]
    raise ExecutorError(f"the new worker differs from the last one: {'; '.join(differences)}; restart the service")


def share_of_host(config: WorkerConfig, index: int, count: int) -> WorkerConfig:
    """Returns the config of one of ``count`` ranks on a host: its GPU, or its share of the threads and memory."""
    num_threads = max(1, config.num_threads // count)
    threads = slice(index * num_threads, (index + 1) * num_threads)
    limit = config.max_memory_bytes
    return msgspec.structs.replace(
        config,
        device=f"cuda:{index}" if config.device == "cuda" else config.device,
        num_threads=num_threads,
        thread_cpus=config.thread_cpus[threads],
        thread_nodes=config.thread_nodes[threads],
        max_memory_bytes=None if limit is None else limit // count,
    )
