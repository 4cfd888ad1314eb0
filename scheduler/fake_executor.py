"""An Executor without a worker process or a model, for tests and benchmarks of all that stands above one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from penstock.scheduler.executor import MAX_PLANS_IN_FLIGHT, ExecutorError
from penstock.scheduler.fake_worker import CheckedSlots, FakeWorker, NextToken, Slots, token_of_history
from penstock.scheduler.plan import StepPlan, StepResult, WorkerFacts


class FakeExecutor:
    """Answers each plan only when the next one is there, or when none comes: so two plans are always in flight.

    ``next_token`` chooses a row's next token; by default it is a function of the history alone. ``slots`` checks what
    the plans do to the KV cache. ``seconds_per_step`` is how long a step takes.
    """

    def __init__(
        self,
        num_blocks: int = 1024,
        vocab_size: int = 256,
        delay_plans: int = 1,
        next_token: NextToken | None = None,
        *,
        block_size: int = 16,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        seconds_per_step: float = 0.0,
        slots: Slots | None = None,
    ) -> None:
        self.facts = WorkerFacts(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            architecture="fake",
            backend="fake",
            device="cpu",
            dtype="float32",
            weight_bytes=0,
            kv_bytes=0,
        )
        self.plans: deque[StepPlan] = deque()
        """Plans that are not answered."""
        self._worker = FakeWorker(
            self.facts, next_token or token_of_history(vocab_size), slots or CheckedSlots(num_blocks, block_size)
        )
        self._delay_plans = delay_plans
        self._seconds_per_step = seconds_per_step
        self._changed = asyncio.Event()
        self._death: str | None = None
        self._stopped = False

    async def start(self) -> WorkerFacts:
        """At once."""
        return self.facts

    def submit(self, plan: StepPlan) -> None:
        """Takes a plan."""
        if self._death is not None:
            raise ExecutorError(self._death)
        assert len(self.plans) < MAX_PLANS_IN_FLIGHT, "too many plans are unanswered"
        self.plans.append(plan)
        self._changed.set()

    async def results(self) -> AsyncIterator[StepResult]:
        """Answers, each a plan late."""
        while True:
            await self._wait_for_plan()
            if self._seconds_per_step:
                await asyncio.sleep(self._seconds_per_step)
            if self._stopped:
                return
            if self._death is not None:
                raise ExecutorError(self._death)
            yield self._worker.run(self.plans.popleft())

    async def _wait_for_plan(self) -> None:
        while not self.plans and not self._stopped and self._death is None:
            self._changed.clear()
            await self._changed.wait()
        # A few turns of the loop, in which the engine would have submitted the next one if it had one.
        for _ in range(4):
            if len(self.plans) > self._delay_plans:
                return
            await asyncio.sleep(0)

    def die(self, message: str = "the worker was killed") -> None:
        """What a crash of the worker looks like from here: plans on their way are lost."""
        self._death = message
        self._changed.set()

    async def stop(self) -> None:
        """Ends ``results``."""
        self._stopped = True
        self._changed.set()
