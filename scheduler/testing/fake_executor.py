"""An executor without a worker process or a model, for tests and benchmarks of the layers above it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace

from penstock.scheduler.executor import MAX_PLANS_IN_FLIGHT, ExecutorError
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, StepPlan, StepResult
from penstock.scheduler.testing.fake_worker import (
    CheckedSlots,
    FakeRow,
    FakeWorker,
    NextToken,
    Slots,
    WorkerKilled,
    token_of_history,
)
from penstock.scheduler.worker_config import WorkerFacts

_FACTS = WorkerFacts(
    num_blocks=1024,
    block_size=16,
    vocab_size=256,
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    architecture="fake",
    backend="fake",
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    weight_bytes=0,
    kv_bytes=0,
    hidden_size=8,
)


class FakeExecutor:
    """Returns the result of each plan only when the next plan has arrived, or when none comes. So two plans are in
    flight, unless steps take so long that the engine delays the next one.

    ``next_token`` chooses a row's next token; by default it is a function of the history. ``slots`` checks what the
    plans do to the KV cache. ``seconds_per_step`` is the time of a step. ``facts`` are the worker's, where they differ
    from the default.

    Its worker dies through ``die``, and in each step with a row for which ``kills`` returns true. ``start`` after
    ``stop`` starts another one, once ``may_start`` is set.
    """

    def __init__(
        self,
        *,
        next_token: NextToken | None = None,
        seconds_per_step: float = 0.0,
        slots: Callable[[], Slots] | None = None,
        kills: Callable[[FakeRow], bool] = lambda row: False,
        **facts: int,
    ) -> None:
        self.facts = replace(_FACTS, **facts)
        self.plans: deque[StepPlan] = deque()
        """Plans without a result."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.num_starts = 0
        self.adapter_loads: list[AdapterLoad] = []
        """The adapters that were loaded, in all workers' lives."""
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.load_errors: dict[str, str] = {}
        """Why the adapters in these directories cannot be loaded."""
        self.fails_to_start: deque[ExecutorError] = deque()
        """One error for each of the next starts."""
        self._next_token = next_token or token_of_history(self.facts.vocab_size)
        sizes = self.facts.num_blocks, self.facts.block_size, self.facts.num_host_blocks
        self._new_slots = slots or (lambda: CheckedSlots(*sizes))
        self._kills = kills
        self._worker = self._new_worker()
        self._seconds_per_step = seconds_per_step
        self._changed = asyncio.Event()
        self._death: ExecutorError | None = None
        self._stopped = False

    async def start(self) -> WorkerFacts:
        """Starts at once, unless ``may_start`` or ``fails_to_start`` prevents it."""
        self.num_starts += 1
        await self.may_start.wait()
        if self.fails_to_start:
            raise self.fails_to_start.popleft()
        if self._stopped:
            self.plans.clear()
            self._worker = self._new_worker()
            self._death = None
            self._stopped = False
        return self.facts

    def _new_worker(self) -> FakeWorker:
        return FakeWorker(self.facts, self._next_token, self._new_slots(), self._kills)

    def submit(self, plan: StepPlan) -> None:
        if self._death is not None:
            raise self._death
        most = MAX_PLANS_IN_FLIGHT + self.facts.pipeline_parallel_size - 1
        assert len(self.plans) < most, "too many plans are in flight"
        self.plans.append(plan)
        self._changed.set()

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Answers once ``may_load`` is set; the digest is the path."""
        await self.may_load.wait()
        if self._death is not None:
            raise self._death
        self.adapter_loads.append(load)
        return AdapterLoaded(8, load.path.encode(), self.load_errors.get(load.path, ""))

    async def results(self) -> AsyncIterator[StepResult]:
        """Yields results, each one plan late."""
        while True:
            await self._wait_for_plan()
            if self._seconds_per_step:
                await asyncio.sleep(self._seconds_per_step)
            if self._stopped:
                return
            if self._death is not None:
                raise self._death
            try:
                result = self._worker.run(self.plans[0])
            except WorkerKilled as killed:
                self._death = ExecutorError(str(killed), blames_step=True)
                raise self._death from killed
            self.plans.popleft()
            if self._seconds_per_step:
                result.computed_us = round(self._seconds_per_step * 1e6)
            yield result

    async def _wait_for_plan(self) -> None:
        while not self.plans and not self._stopped and self._death is None:
            self._changed.clear()
            await self._changed.wait()
        # A few iterations of the loop, in which the engine would have submitted the next plan if it had one.
        for _ in range(4):
            if len(self.plans) > 1:
                return
            await asyncio.sleep(0)

    def die(self, message: str = "the worker was killed", blames_step: bool = False) -> None:
        self._death = ExecutorError(message, blames_step)
        self._changed.set()

    def kill(self, why: str) -> None:
        self.die(why, blames_step=True)

    async def stop(self) -> None:
        self._stopped = True
        self._changed.set()
