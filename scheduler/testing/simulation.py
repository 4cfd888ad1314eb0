"""Simulates a scheduler under load in virtual time: minutes in seconds, deterministically.

Only the clock and the worker are simulated; a step takes the time that a function of its work returns. For tests of
policies, deadlines and predictions. It needs no event loop.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.kv.block_hash import hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams, StepPlan, StepResult
from penstock.scheduler.request import (
    EngineFinishReason,
    Event,
    Refused,
    Request,
    RequestAccepted,
    RequestFinished,
    SequenceDelta,
    TextDelta,
)
from penstock.scheduler.testing.fake_worker import FakeWorker, Slots
from penstock.scheduler.timing.step_time import StepWork
from penstock.scheduler.worker_config import WorkerFacts

StepSeconds = Callable[[StepWork], float]
"""Returns the time of a step."""


def cpu_step_s(work: StepWork) -> float:
    """Returns about the time of the demo model on one core."""
    return 1e-3 * (
        2.6
        + 0.033 * work.prefill_tokens
        + 6.4e-5 * work.prefill_kv
        + 0.056 * work.decodes
        + 3.6e-4 * work.decode_kv
        + 1.1 * work.chunks
        + 8.6e-4 * work.chunk_kv
    )


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are virtual seconds."""

    request: Request
    refused: Refused | None = None
    accepted: RequestAccepted | None = None
    first_token_at: float | None = None
    finished: RequestFinished | None = None
    ended_at: float | None = None
    num_tokens: int = 0
    num_computed: int = 0
    """Positions that the worker computed for it."""

    @property
    def is_good(self) -> bool:
        """Whether it ended normally, and in time if it had a deadline."""
        if self.finished is None or self.finished.reason not in (EngineFinishReason.STOP, EngineFinishReason.LENGTH):
            return False
        assert self.ended_at is not None
        return self.request.deadline is None or self.ended_at <= self.request.deadline

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival


class Simulation:
    """A simulation, whose time passes only in ``run``."""

    def __init__(
        self,
        facts: WorkerFacts,
        config: SchedulerConfig,
        step_s: StepSeconds = cpu_step_s,
        slots: Slots | None = None,
    ) -> None:
        self.now = 0.0
        self._block_size = facts.block_size
        self._caches_prefixes = config.enable_prefix_caching
        self.outcomes: list[Outcome] = []
        """The requests in the order of the calls of ``ask``."""
        self.scheduler = Scheduler(facts, config, clock=lambda: self.now)
        self._worker = _TimedWorker(facts, step_s, slots or Slots())
        self._plans: deque[StepPlan] = deque()
        self._result: StepResult | None = None
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def ask(
        self,
        when: float,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        tenant: str = "default",
        priority: int = 0,
        within_s: float | None = None,
        stops_after: int | None = None,
        max_drafts: int = 0,
        n: int = 1,
        history: Sequence[int] = (),
    ) -> Outcome:
        """Adds a request that arrives at ``when`` and must end within ``within_s`` of that. Its output ends by itself
        after ``stops_after`` tokens.

        Its prompt is ``history``, which other requests may share, followed by ``num_prompt_tokens`` of its own.
        """
        number = len(self.outcomes)
        prompt = [*history, *[number] * num_prompt_tokens]
        request = Request(
            str(number),
            prompt,
            block_hashes=hash_blocks(prompt, self._block_size, b"") if self._caches_prefixes else [],
            n=n,
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            sink=lambda event: self._note(outcome, event),
            make_text=lambda: _StopAfter(stops_after),
            tenant=tenant,
            priority=priority,
            deadline=None if within_s is None else when + within_s,
            arrival=when,
            max_drafts=max_drafts,
        )
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self.at(when, lambda: self._arrive(outcome))
        return outcome

    def run(self, until: float = float("inf")) -> None:
        """Runs until the given time, or until no events are left."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self._pump()
        if until < float("inf"):
            self.now = until

    def _arrive(self, outcome: Outcome) -> None:
        request = outcome.request
        try:
            self.scheduler.add_request(request)
        except Refused as refused:
            outcome.refused, outcome.ended_at = refused, self.now
            return
        if request.deadline is not None:
            self.at(request.deadline, lambda: self.scheduler.abort(request.request_id, EngineFinishReason.DEADLINE))

    def _pump(self) -> None:
        """Plans as soon as another plan may be in flight, without the engine's delay, and starts the next step."""
        while (plan := self.scheduler.schedule()) is not None:
            self._plans.append(plan)
        if self._plans and self._result is None:
            plan = self._plans[0]
            self._result = self._worker.run(plan)
            self.at(self.now + self._result.computed_us * 1e-6, self._answer)

    def _answer(self) -> None:
        result, self._result = self._result, None
        assert result is not None
        self._plans.popleft()
        for number, num_tokens in self._worker.take_computed():
            self.outcomes[number].num_computed += num_tokens
        self.scheduler.update(result)

    def _note(self, outcome: Outcome, event: Event) -> None:
        if isinstance(event, RequestAccepted):
            outcome.accepted = event
        elif isinstance(event, SequenceDelta):
            outcome.num_tokens += len(event.token_ids)
            if outcome.first_token_at is None:
                outcome.first_token_at = self.now
        elif isinstance(event, RequestFinished):
            outcome.finished, outcome.ended_at = event, self.now


class _StopAfter:
    """Ends the output after this many tokens, as a stop string does."""

    def __init__(self, stops_after: int | None) -> None:
        self._left = stops_after

    def feed(self, token_id: int) -> TextDelta:
        if self._left is not None:
            self._left -= 1
        return TextDelta(1, "", stop="" if self._left == 0 else None)

    def finish(self) -> TextDelta:
        return TextDelta(0, "")

    def restart(self) -> None:
        """Does nothing: nothing is injected."""


class _TimedWorker(FakeWorker):
    """A worker whose results contain simulated times. The last token of a prompt is the number of its request, and so
    is all output."""

    def __init__(self, facts: WorkerFacts, step_s: StepSeconds, slots: Slots) -> None:
        super().__init__(facts, _same_again, slots)
        self._step_s = step_s
        self._computed: list[tuple[int, int]] = []

    def run(self, plan: StepPlan) -> StepResult:
        """Returns the result, with the time of the step."""
        result = super().run(plan)
        self._computed += [(self._number(chunk.row), chunk.end - chunk.start) for chunk in plan.chunks]
        self._computed += [(self._number(decode.row), 1) for decode in plan.decodes]
        decode_kv = sum(self._rows[decode.row].num_computed for decode in plan.decodes)
        result.computed_us = max(1, round(self._step_s(StepWork.of(plan, decode_kv)) * 1e6))
        return result

    def _number(self, row: int) -> int:
        return self._rows[row].history[self._rows[row].num_prompt_tokens - 1]

    def take_computed(self) -> list[tuple[int, int]]:
        """Returns requests' numbers and the positions computed for them since the last call."""
        computed, self._computed = self._computed, []
        return computed


def _same_again(history: Sequence[int], sampling: SamplingParams) -> int:
    return history[-1]
