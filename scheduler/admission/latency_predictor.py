"""Predicts the times of steps, of waiting and of whole requests. Reads rows and the queue; changes nothing."""

import math
from collections import deque
from statistics import median

from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.sequence import RequestState
from penstock.scheduler.policy import Rank
from penstock.scheduler.request import EngineFinishReason, Request
from penstock.scheduler.timing.queue_time import Prediction, QueueLoad, QueueTimeModel
from penstock.scheduler.timing.queued_work import NO_WORK, QueuedWork, fork_work, sequence_work
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork

NUM_RECENT_STEPS = 128
MIN_MARGIN_S, MARGIN = 0.003, 0.25
"""Minimum lead of the next plan over the worker: a constant or this fraction of the step, whichever is larger. A longer
lead after each wait of the worker was tried: it waited no less, and a tenant beside a busy one waited 15 % longer."""
SHORT_PROMPT = 32
UNTESTED_S = 30.0
"""A prediction that has not been tested for this long no longer refuses requests: it may be the reason why there were
none."""


class LatencyPredictor:
    """Predicts from the times that steps and requests have taken so far."""

    def __init__(self, context: PlanningContext, model: StepTimeModel) -> None:
        self._context = context
        self._model = model
        self._block_size = context.kv.block_size
        self._clock = context.clock
        self._in_flight: deque[StepWork] = deque()
        self._answered_at = self._clock()
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._queue_time = QueueTimeModel(model, context.budget, context.config.target_itl_s)
        self._learned_at = self._prompts_at = self._clock()
        """The last times that a request tested the predictions, and that a step computed prompts."""

    def reconfigure(self) -> None:
        """Applies the limits of the planning context."""
        self._queue_time.configure(self._context.budget, self._context.config.target_itl_s)

    def planned(self, plan: StepPlan) -> None:
        """Records that this plan, the last one, is in flight."""
        if not self._in_flight:
            self._answered_at = self._clock()
        self._in_flight.append(StepWork.of(plan, self._context.decode_kv))

    def answered(self, result: StepResult) -> None:
        work, seconds = self._in_flight.popleft(), result.computed_us * 1e-6
        drafted = [row for row in result.rows if row.num_drafted]
        num_drafted, num_tokens = sum(row.num_drafted for row in drafted), sum(len(row.token_ids) for row in drafted)
        if result.computed_us:  # otherwise all of its rows waited for something
            self._model.observe(work, seconds, num_drafted, num_tokens - len(drafted))
            self._recent_s.append(seconds)
        self._answered_at = self._clock()
        if work.chunks:
            self._prompts_at = self._answered_at

    def restart(self) -> None:
        """Discards the steps in flight, which are lost."""
        self._in_flight.clear()

    @property
    def median_step_s(self) -> float:
        """The median time of the last steps; 0 before the first."""
        return median(self._recent_s) if self._recent_s else 0.0

    @property
    def oldest_step_s(self) -> float | None:
        """The predicted time of the step that is being computed; None without one, or while nothing is known."""
        return self._model.predict(self._in_flight[0]) if self._in_flight else None

    @property
    def spare_s(self) -> float:
        """How long the next plan can be delayed and still arrive before the worker needs it. The step may be shorter
        than predicted, because the worker may draft nothing. Requests that arrive in this time are in the plan, and do
        not wait for another whole step. 0 while too little is known."""
        if not self._in_flight or len(self._in_flight) != self._context.max_plans_in_flight - 1:
            return 0.0
        step_s = self._model.predict(self._in_flight[0], drafts=0) or 0.0
        return max(0.0, self._answered_at + step_s - max(MIN_MARGIN_S, MARGIN * step_s) - self._clock())

    def began(self, live: RequestState, now: float) -> None:
        """Records a request's first token."""
        if live.expected_s is not None and live.expected_ttft_s is not None:
            self._queue_time.learn_ttft(live.work, live.expected_ttft_s, now - live.entered_at)

    def ended(self, live: RequestState, reason: EngineFinishReason) -> None:
        """Learns from a finished request: the length of its output, and how good its predictions were."""
        if reason in (EngineFinishReason.STOP, EngineFinishReason.LENGTH):
            for sequence in live.sequences:
                if not sequence.is_pooled:
                    self._queue_time.learn(sequence.output.num_tokens, sequence.output.max_tokens)
            if live.expected_s is not None:
                self._learn_total(live, live.expected_s, self._clock() - live.entered_at)
        elif reason is EngineFinishReason.DEADLINE and live.expected_s is not None:
            deadline = live.request.deadline
            # Its end is unknown, but was too late. This counts only if it was predicted to be in time.
            if deadline is not None and live.entered_at + live.expected_s <= deadline:
                self._learn_total(live, live.expected_s, math.inf)

    def _learn_total(self, live: RequestState, expected_s: float, took_s: float) -> None:
        self._queue_time.learn_total(live.work, expected_s, took_s)
        self._learned_at = self._clock()

    def predict(self, request: Request, work: QueuedWork, rank: Rank, would_make_room: bool) -> Prediction | None:
        """Predicts the times of a request with this work that enters the queue now; None while too little is known.
        ``would_make_room``: whether a running row would be preempted for it."""
        if self._clock() - self._learned_at > UNTESTED_S:
            self._queue_time.forget_lateness()
        if would_make_room:
            load = self._load(NO_WORK)
            load.free_rows, load.free_blocks = max(1, load.free_rows), load.num_blocks
        else:
            load = self._load(self._context.waiting.work_ahead(request.tenant, rank, request.deadline))
        num_forks = request.n - request.num_prompts
        self._queue_time.learn_arrival(work)
        forks = fork_work(len(request.prompt_token_ids), num_forks, self._block_size) if num_forks else NO_WORK
        return self._queue_time.predict(load, work, request.max_tokens, forks)

    @property
    def needs_test(self) -> bool:
        """Whether wrong predictions would stay unnoticed: no prompt was computed recently, and none will be."""
        context = self._context
        return self._is_untested and not len(context.waiting) and not context.running.prefilling

    @property
    def _is_untested(self) -> bool:
        return self._clock() - self._prompts_at > UNTESTED_S

    @property
    def short_ttft_s(self) -> float | None:
        """The predicted time to the first token of a short request that enters the queue now; None while too little is
        known."""
        work = sequence_work(SHORT_PROMPT, SHORT_PROMPT, self._block_size)
        prediction = self._queue_time.predict(self._load(self._context.waiting.work), work, 1)
        return None if prediction is None else prediction.ttft_s

    def service_s(self, request: Request, work: QueuedWork) -> float | None:
        """Returns how long a request with this work takes if it begins now; None while too little is known."""
        num_decoding = len(self._context.running.decoding)
        return self._queue_time.service_s(num_decoding, self._context.decode_kv, work, request.max_tokens)

    def alone_s(self, request: Request, work: QueuedWork) -> float | None:
        """Returns how long a request with this work takes when it runs alone; None while too little is known."""
        return self._queue_time.alone_s(work, request.max_tokens)

    def is_late(self, live: RequestState) -> bool:
        """Returns whether a request that has not begun can no longer meet its deadline, although it could have when it
        arrived.

        A request that could never meet its deadline runs until then: its caller gets the output up to then.
        """
        request = live.request
        if request.deadline is None or self._is_untested:
            return False
        # A request to embed may have thousands of prompts, too many to read each time.
        work = live.work if request.pooling is not None else live.sequences[0].work
        service_s, alone_s = self.service_s(request, work), self.alone_s(request, work)
        if service_s is None or alone_s is None:
            return False
        return self._clock() + service_s > request.deadline and request.arrival + alone_s <= request.deadline

    def _load(self, ahead: QueuedWork) -> QueueLoad:
        context = self._context
        running, pool, num_groups = context.running, context.kv.pool, context.kv.windows.groups.num_groups
        in_flight_s = sum(self._model.predict(work) or 0.0 for work in self._in_flight)
        for sequence in running.prefilling:
            if not sequence.live.forked:  # its other sequences follow as soon as its prompt is computed
                num_forks = sequence.live.request.n - 1
                ahead = ahead.plus(fork_work(sequence.num_prompt_tokens, num_forks, self._block_size))
        return QueueLoad(
            in_flight_s=max(0.0, in_flight_s - (self._clock() - self._answered_at)) if self._in_flight else 0.0,
            decodes=len(running.decoding),
            decode_kv=context.decode_kv,
            prefill_tokens=sum(sequence.prefill_end - sequence.num_planned for sequence in running.prefilling),
            prefill_rows=len(running.prefilling),
            prefill_context=sum(sequence.prefill_end for sequence in running.prefilling),
            ahead=ahead,
            remaining=[sequence.length_limit - sequence.length_bound for sequence in running],
            free_rows=context.max_rows - len(running),
            max_rows=context.max_rows,
            # As if every sequence were shorter than its windows.
            free_blocks=pool.num_free // num_groups,
            num_blocks=pool.num_blocks // num_groups,
            block_size=self._block_size,
            prefill_kv=sum(
                (sequence.prefill_end - sequence.num_planned) * (sequence.prefill_end + sequence.num_planned) // 2
                for sequence in running.prefilling
            ),
        )
