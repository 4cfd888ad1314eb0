"""One Executor over the worker processes of a model's ranks, on this host and perhaps on others. When one is lost, all
end."""

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.models.executor.process import WorkerProcess
from penstock.models.executor.rank import OtherHosts, RankWorker, share_of_host
from penstock.models.executor.spawn import Spawned
from penstock.models.executor.wire import FrameKind, encode_frame
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, StepPlan, StepResult
from penstock.scheduler.worker_config import Meeting, MeetingPorts, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
"""How often the ranks that still load are logged, if some run on other hosts."""
SECRET_BYTES = 32

ANSWER_S = 0.2
"""How long rank 0 has to return the results of the steps before the one in which another rank failed."""


def new_executor(config: WorkerConfig, spawned: Spawned | None = None, hosts: OtherHosts | None = None) -> Executor:
    """Returns the executor for a service with this config. ``spawned`` is a worker process that was started already,
    and ``hosts`` are those that run ranks besides this one."""
    if config.num_ranks == 1:
        return WorkerProcess(config, spawned=spawned)
    if spawned is not None:
        spawned.drop()  # ranks are started together
    return WorkerGroup(config, hosts)


class WorkerGroup:
    """An ``Executor`` over one worker process per rank. Every rank gets every plan; with stages, only rank 0 does, and
    the others compute layers for it. Only rank 0 returns results. When one ends, all are ended, and the next ``start``
    starts all of them.

    Host n of N has the ranks n * R / N to (n + 1) * R / N - 1 of R ranks; this host is host 0. On one host they meet in
    a directory. On several they meet by TCP: rank 0 starts first and reports the ports.
    """

    def __init__(self, config: WorkerConfig, hosts: OtherHosts | None = None) -> None:
        self._config = config
        self._hosts = hosts
        # The name cannot be guessed, and creating the directory fails if it exists.
        self._directory = Path(tempfile.gettempdir()) / f"penstock-{secrets.token_hex(16)}"
        self._num_local = config.num_ranks // (1 if hosts is None else hosts.num_nodes)
        self._workers = [self._new_worker(rank) for rank in range(config.num_ranks)]
        self._planned = self._workers[: 1 if config.pipeline_parallel_size > 1 else None]
        """The workers that get plans."""
        self._answers: asyncio.Queue[StepResult | ExecutorError | None] = asyncio.Queue()
        self._watches: list[asyncio.Task[None]] = []
        self._lost: ExecutorError | None = None

    def _new_worker(self, rank: int) -> RankWorker:
        config = _of_rank(self._config, rank)
        if self._hosts is not None and rank >= self._num_local:
            return self._hosts.worker(config, rank)
        if self._hosts is None:
            config = msgspec.structs.replace(config, meeting=Meeting(directory=str(self._directory)))
        return WorkerProcess(share_of_host(config, rank, self._num_local))

    async def start(self) -> WorkerFacts:
        """Starts all ranks, and waits until all have loaded. Raises ExecutorError with the first failure."""
        assert not self._watches, "the workers are running"
        self._answers, self._lost = asyncio.Queue(), None
        starts: list[asyncio.Task[WorkerFacts]] = []
        report = asyncio.create_task(self._report_loading(starts))
        try:
            if self._hosts is None:
                self._make_directory()
                starts += [asyncio.create_task(worker.start()) for worker in self._workers]
            else:
                await self._start_by_tcp(await self._hosts.gather(), starts)
            facts = await asyncio.gather(*starts)
        except BaseException:
            try:
                await self.stop()
            finally:
                for start in starts:  # one that has no process yet
                    start.cancel()
            if starts:
                await asyncio.wait(starts)
            raise
        finally:
            report.cancel()
        self._watches = [asyncio.create_task(self._watch(rank)) for rank in range(len(facts))]
        return facts[0]

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise ExecutorError(f"cannot create the directory in which the ranks meet: {error}") from error

    async def _start_by_tcp(self, host: str, starts: list[asyncio.Task[WorkerFacts]]) -> None:
        """Starts rank 0, and the others as soon as it reports its ports. ``host`` is this host's address. Adds the
        tasks to ``starts``. Raises ExecutorError if rank 0 does not start."""
        secret = secrets.token_bytes(SECRET_BYTES)
        meeting = msgspec.structs.replace(self._config.meeting, host=host, secret=secret)
        ports: asyncio.Future[MeetingPorts] = asyncio.get_running_loop().create_future()
        first, *others = self._workers
        starts.append(asyncio.create_task(first.start(meeting, ports.set_result)))
        awaited: list[asyncio.Future[Any]] = [starts[0], ports]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not ports.done():
            await starts[0]
            raise ExecutorError("rank 0 reported no ports")
        found = ports.result()
        meeting = msgspec.structs.replace(meeting, store_port=found.store_port, stage_port=found.stage_port)
        starts += [asyncio.create_task(worker.start(meeting)) for worker in others]

    async def _report_loading(self, starts: list[asyncio.Task[WorkerFacts]]) -> None:
        """Logs which ranks still load, while others on several hosts wait for them."""
        while self._hosts is not None:
            await asyncio.sleep(LOG_INTERVAL_S)
            slow = [rank for rank, start in enumerate(starts) if not start.done()]
            if slow:
                places = ", ".join(f"{rank} (node rank {rank // self._num_local})" for rank in slow)
                logger.info("ranks that still load the model: %s", places)

    def submit(self, plan: StepPlan) -> None:
        if self._lost is not None:
            raise self._lost
        frame = encode_frame(FrameKind.PLAN, plan)
        for worker in self._planned:
            worker.submit_frame(frame)

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Never called: LoRA adapters with several ranks are refused at the start."""
        raise AssertionError("a model with several ranks has no slots for adapters")

    async def results(self) -> AsyncIterator[StepResult]:
        answers = self._answers
        while (item := await answers.get()) is not None:
            if isinstance(item, ExecutorError):
                raise item
            yield item

    def kill(self, why: str) -> None:
        if self._watches and self._lost is None:
            self._end_all(ExecutorError(why, blames_step=True))

    async def stop(self) -> None:
        watches, self._watches = self._watches, []
        try:
            await asyncio.gather(*(worker.stop() for worker in self._workers))
        finally:
            for watch in watches:
                watch.cancel()
            self._answers.put_nowait(None)
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _watch(self, rank: int) -> None:
        """Receives a rank's results until it ends."""
        try:
            async for result in self._workers[rank].results():
                self._answers.put_nowait(result)
        except ExecutorError as error:
            if self._lost is None:
                self._lost = ExecutorError(f"rank {rank}: {error}", error.blames_step)
                if rank and error.blames_step:
                    await asyncio.sleep(ANSWER_S)
                self._end_all(self._lost)

    def _end_all(self, why: ExecutorError) -> None:
        self._lost = why
        for worker in self._workers:
            worker.kill(str(why))
        self._answers.put_nowait(why)


def _of_rank(config: WorkerConfig, rank: int) -> WorkerConfig:
    """Returns a rank's own config, except for its share of the host."""
    stage, part = divmod(rank, config.tensor_parallel_size)
    return msgspec.structs.replace(
        config,
        tensor_parallel_rank=part,
        pipeline_parallel_rank=stage,
        # What all ranks would log, only rank 0 logs.
        log_level=config.log_level if rank == 0 else "error",
    )
