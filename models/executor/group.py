"""One Executor over the worker processes of a model's ranks. When one is lost, all end."""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from penstock.models.executor.process import WorkerProcess
from penstock.models.executor.spawn import Spawned
from penstock.models.executor.wire import FrameKind, encode_frame
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.worker_config import Meeting, WorkerConfig, WorkerFacts

ANSWER_S = 0.2
"""How long rank 0 has to return the results of the steps before the one in which another rank failed."""


def new_executor(config: WorkerConfig, spawned: Spawned | None = None) -> Executor:
    """Returns the executor for a service with this config. ``spawned`` is a worker process that was started already."""
    if num_ranks(config) == 1:
        return WorkerProcess(config, spawned=spawned)
    if spawned is not None:
        spawned.drop()  # ranks are started together
    return WorkerGroup(config)


def num_ranks(config: WorkerConfig) -> int:
    """Returns the number of ranks of a model."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


class WorkerGroup:
    """An ``Executor`` over one worker process per rank. Every rank of the first stage gets every plan, and only rank 0
    returns results. When one ends, all are ended, and the next ``start`` starts all of them."""

    def __init__(self, config: WorkerConfig) -> None:
        # The name cannot be guessed, and creating the directory fails if it exists.
        self._directory = Path(tempfile.gettempdir()) / f"penstock-{secrets.token_hex(16)}"
        ranks = range(num_ranks(config))
        self._workers = [WorkerProcess(_of_rank(config, rank, self._directory)) for rank in ranks]
        self._planned = self._workers[: config.tensor_parallel_size]
        """Those of the first stage."""
        self._answers: asyncio.Queue[StepResult | ExecutorError | None] = asyncio.Queue()
        self._watches: list[asyncio.Task[None]] = []
        self._lost: ExecutorError | None = None

    async def start(self) -> WorkerFacts:
        """Starts all ranks, and waits until all have loaded. Raises ExecutorError with the first failure."""
        assert not self._watches, "the workers are running"
        self._answers, self._lost = asyncio.Queue(), None
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            raise ExecutorError(f"cannot create the directory in which the ranks meet: {error}") from error
        starts = [asyncio.create_task(worker.start()) for worker in self._workers]
        try:
            facts = await asyncio.gather(*starts)
        except BaseException:
            try:
                await self.stop()
            finally:
                for start in starts:  # one that has no process yet
                    start.cancel()
            await asyncio.wait(starts)
            raise
        self._watches = [asyncio.create_task(self._watch(rank)) for rank in range(len(facts))]
        return facts[0]

    def submit(self, plan: StepPlan) -> None:
        if self._lost is not None:
            raise self._lost
        frame = encode_frame(FrameKind.PLAN, plan)
        for worker in self._planned:
            worker.submit_frame(frame)

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


def _of_rank(config: WorkerConfig, rank: int, directory: Path) -> WorkerConfig:
    """Returns a rank's own config: its GPU, or its share of the host's threads and memory."""
    size, limit = num_ranks(config), config.max_memory_bytes
    num_threads = max(1, config.num_threads // size)
    threads = slice(rank * num_threads, (rank + 1) * num_threads)
    stage, part = divmod(rank, config.tensor_parallel_size)
    return msgspec.structs.replace(
        config,
        tensor_parallel_rank=part,
        pipeline_parallel_rank=stage,
        meeting=Meeting(directory=str(directory)),
        device=f"cuda:{rank}" if config.device == "cuda" else config.device,
        num_threads=num_threads,
        thread_cpus=config.thread_cpus[threads],
        thread_nodes=config.thread_nodes[threads],
        max_memory_bytes=None if limit is None else limit // size,
        # What all ranks would log, only rank 0 logs.
        log_level=config.log_level if rank == 0 else "error",
    )
