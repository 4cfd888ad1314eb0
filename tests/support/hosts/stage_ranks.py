"""The ranks of a model in stages as threads of this process, so that a test need not import torch for each of them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from engines import InProcessExecutor
from torch import Tensor

from penstock.models.backends.base import load_stage
from penstock.models.backends.tensor_parallel import ALONE, PeerLost, TensorParallel
from penstock.models.executor.group import _of_rank
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts


class ThreadGroup:
    """The ranks of a stage."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, part: Any) -> list[Any]:
        """Each rank's part, on every rank."""
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()  # all have them
        return parts


class ThreadRank:
    """A ``TensorParallel``; sums are in the order of the ranks."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size = rank, group.size
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._group.exchange(self.rank, x.clone())).sum(0))

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return torch.cat(self._group.exchange(self.rank, x), 1)[:, :num_columns]

    def least(self, number: int) -> int:
        return int(min(self._group.exchange(self.rank, number)))


class ThreadJoin:
    """Stands for ``distributed.join``."""

    def __init__(self, config: WorkerConfig) -> None:
        self._groups = [ThreadGroup(config.tensor_parallel_size) for _ in range(config.pipeline_parallel_size)]

    def __call__(self, config: WorkerConfig) -> TensorParallel:
        if config.tensor_parallel_size == 1:
            return ALONE
        return ThreadRank(config.tensor_parallel_rank, self._groups[config.pipeline_parallel_rank])


@contextlib.contextmanager
def serving_ranks(config: WorkerConfig) -> Iterator[None]:
    """Runs all ranks but rank 0, until rank 0 closes its links."""

    def serve(rank: int) -> None:
        stage: Any = load_stage(_of_rank(config, rank))
        with contextlib.suppress(PeerLost):
            stage.serve()
        stage._link.close()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(1, config.num_ranks)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


class StagedExecutor(InProcessExecutor):
    """Rank 0 in this process. As in a worker, one thread starts plans and another one waits for them: a plan whose rows
    have no tokens yet waits for those of an earlier plan."""

    async def start(self) -> WorkerFacts:
        facts = await super().start()
        self._loop = asyncio.get_running_loop()
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._started: SimpleQueue[Callable[[], StepResult] | None] = SimpleQueue()
        self._answers: asyncio.Queue[StepResult | ExecutorError | None] = asyncio.Queue()
        self._threads = [threading.Thread(target=run) for run in (self._start_all, self._finish_all)]
        for thread in self._threads:
            thread.start()
        return facts

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    async def results(self) -> AsyncIterator[StepResult]:
        while (item := await self._answers.get()) is not None:
            if isinstance(item, ExecutorError):
                raise item
            yield item

    async def stop(self) -> None:
        self._plans.put(None)
        self._answers.put_nowait(None)

    def close_links(self) -> None:
        """Ends the other ranks."""
        first_stage: Any = self._runner._backend
        for links in first_stage._stages:
            for link in links:
                link.close()

    def _start_all(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._started.put(self._runner.start_step(plan))
            except Exception as error:
                self._answer(ExecutorError(f"{type(error).__name__}: {error}"))
        self._started.put(None)

    def _finish_all(self) -> None:
        while (finish := self._started.get()) is not None:
            try:
                self._answer(finish())
            except Exception as error:
                self._answer(ExecutorError(f"{type(error).__name__}: {error}"))

    def _answer(self, item: StepResult | ExecutorError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answers.put_nowait, item)
