"""Decides what runs next: ``schedule`` makes a plan, ``update`` applies a result. Synchronous, without workers.

There are no phases. A row's history is longer than the computed part of it, and a step lets some rows catch up within a
token budget. Two rules make this safe while two plans are in flight:

- Plans run in order, and this order protects memory. A block that is free when a plan is made may be given out in that
  plan: everything planned for its last holder runs before. KV that a plan computes from known tokens may be read by
  every later plan, so the blocks of chunks are published as soon as their plan is complete. A decoding row's blocks are
  published when a result confirms them, because their tokens are not known before.
- Tokens in flight count. A row is never continued past its limit, counting them, and a preempted row begins again only
  after its tokens in flight have arrived.

When a worker dies, every row is preempted: plans in flight are lost, and all sequences wait again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.kv.manager import KVCacheManager
from penstock.kv.retention import LeaseKind
from penstock.scheduler.admission.intake import RequestIntake
from penstock.scheduler.admission.latency_predictor import LatencyPredictor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineLoad, EngineState
from penstock.scheduler.loop.live_requests import LiveRequestFilter, LiveRequestScan
from penstock.scheduler.loop.output_processor import OutputProcessor
from penstock.scheduler.loop.repetition_search import RepetitionSearch
from penstock.scheduler.plan import PromptLogprobsPart, StepPlan, StepResult
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.planning.sequence import RequestState, SequenceState, SequenceStatus
from penstock.scheduler.policy import Rank
from penstock.scheduler.repetition import MAX_VOCAB_SIZE
from penstock.scheduler.request import Change, Context, EngineFinishReason, Request, RequestAccepted, SequenceDelta
from penstock.scheduler.timeline import EndedTimelines, Timeline
from penstock.scheduler.timeline_entry import WaitCause
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork
from penstock.scheduler.worker_config import WorkerFacts

logger = logging.getLogger(__name__)


class Scheduler:
    """Turns requests into plans, and results into events. A request's events go to its sink, at once and in order."""

    def __init__(
        self,
        facts: WorkerFacts,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.kv = KVCacheManager(
            facts.num_blocks,
            facts.block_size,
            facts.num_host_blocks,
            facts.num_state_slots,
            facts.groups,
            caches_prefixes=config.enable_prefix_caching,
        )
        context = PlanningContext(self.kv, facts, config, clock)
        self.waiting, self.running, self.tenants = context.waiting, context.running, context.tenants
        self.counters, self._bisector, self._context = context.counters, context.bisector, context
        self.adapters = context.adapters
        self._ended_timelines = EndedTimelines(config.explain_requests)
        model = StepTimeModel(facts.copy_us_per_block * 1e-6)
        for measured in facts.measured_steps:
            model.observe(StepWork.measured(measured), measured.computed_us * 1e-6)
        self.predictor = LatencyPredictor(context, model)
        self._planner = Planner(context, model, self.predictor.is_late)
        self.requests: dict[str, RequestState] = {}
        """The requests that have not finished, in order of arrival."""
        self._intake = RequestIntake(context, self._planner, self.predictor, self.requests)
        self._output_processor = OutputProcessor(self._planner, self.predictor, clock, self._finish)
        searches = config.drafts_on_repetition and facts.vocab_size <= MAX_VOCAB_SIZE
        self._repetition_search = RepetitionSearch(context.running) if searches else None
        self._clock = clock
        self._on_finished = on_finished
        self._num_arrived = 0
        self.num_held = 0
        """Requests that are held back because their output is not read."""
        self._in_flight: deque[StepPlan] = deque()

    def charge(self, tenant: str, kind: Rated) -> None:
        """Counts a request or call against its tenant's rate, before any work is done for it and whatever its outcome.
        Raises Refused, without counting it, if the rate is used up."""
        self._intake.check_rates(tenant, kind)
        self.tenants.charge(tenant, kind)

    def add_request(self, request: Request) -> None:
        """Puts a request into the queue and notifies its sink; ends the one that it supersedes. Raises Refused, without
        ending it."""
        assert request.request_id not in self.requests, "request ids are unique among live requests"
        superseded = self.requests.get(request.supersedes)
        if superseded is not None:
            assert superseded.request.tenant == request.tenant, "a request supersedes only one of its own tenant"
        is_first = len(self.requests) == (superseded is not None)
        entry = self._intake.examine(request, self._num_arrived, is_first=is_first, superseded=superseded)
        texts = [request.make_text() for _ in range(request.n)]  # may raise, so it comes before any change
        tenant, timeline = self.tenants.enter(request), Timeline(request, self._clock)
        live = RequestState(request, self._num_arrived, texts, tenant, timeline)
        live.entered_at, live.work, live.place = entry.entered_at, entry.work, entry.place
        self._intake.grammar_budget.count(request, 1)
        self._num_arrived += 1
        self.requests[request.request_id] = live
        if superseded is not None:  # it ends first, and there is always a live request
            self._finish(superseded, EngineFinishReason.SUPERSEDED, "")
        for index in range(request.num_entering):
            self._planner.enter(self._new_sequence(live, index, (*entry.rank[:3], index)))
        ttft_s = None
        if entry.prediction is not None:
            ttft_s, live.expected_s = entry.prediction.ttft_s, entry.prediction.total_s
            live.expected_ttft_s = entry.prediction.modelled_ttft_s
        timeline.accepted(entry.position, ttft_s)
        request.sink(RequestAccepted(entry.num_cached_tokens, entry.position, ttft_s))
        if request.resumed:
            self.counters.resumed_requests += 1
            self._output_processor.end_resumed(live)

    def update_request(self, request_id: str, change: Change) -> bool:
        """Changes a live request from the next plan on; returns False if it is not alive. Raises Refused, without
        changing anything."""
        live = self.requests.get(request_id)
        if live is None:
            return False
        request = live.request.changed(change)
        if change.max_tokens is not None:  # no other change makes it larger; its tenant's caps may be lower now
            self._intake.admission.check_size(request)
            live.expected_s = None
        live.request = request
        live.timeline.updated(change)
        for sequence in list(live.sequences):
            if sequence.state is not SequenceStatus.ENDED:
                rank = self._intake.rank(request, live.place, sequence.index, live.work)
                self._planner.change_rank(sequence, rank)
                if change.max_tokens is not None:
                    num_injected = sequence.num_injected + len(sequence.to_inject)
                    max_tokens = self._intake.admission.max_tokens(request, num_injected)
                    self._output_processor.limit(sequence, max_tokens)
        return True

    def inject(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Puts tokens into the history of a live request, after its tokens in flight; its sink then gets
        ``TokensInjected``. Returns False if it is not alive. Raises Refused, without changing anything."""
        live = self.requests.get(request_id)
        if live is None:
            return False
        self._intake.check_injection(live, len(token_ids))
        self.tenants.charge_tokens(live.tenant, len(token_ids))
        live.expected_s = None
        sequence = live.sequences[0]
        num_injected = sequence.num_injected + len(sequence.to_inject) + len(token_ids)
        sequence.limit(min(sequence.output.max_tokens, self._intake.admission.max_tokens(live.request, num_injected)))
        self._output_processor.inject(sequence, token_ids)
        return True

    def hold(self, request_id: str, held: bool) -> None:
        """Holds a request back, or releases it. While it is held, it is in no plan, and its rows are preempted before
        any other."""
        live = self.requests.get(request_id)
        if live is None or live.held == held:
            return
        self._planner.hold(live, held)
        self.num_held += 1 if held else -1
        self._bisector.hold(request_id, held)
        if held:
            live.expected_s = None
            live.timeline.held()
        else:
            live.timeline.released()

    def release(self, block_hashes: Sequence[bytes], tenant: str) -> None:
        """Gives up the KV that is retained under these hashes for contexts of a tenant."""
        self.kv.give_up(block_hashes, tenant)

    def explain(self, request_id: str) -> Timeline | None:
        """Returns the timeline of a request that is alive or ended recently."""
        live = self.requests.get(request_id)
        if live is None:
            return self._ended_timelines.find(request_id)
        self._emit_so_far(live)
        return live.timeline

    def scan(self, wanted: LiveRequestFilter, after: int) -> LiveRequestScan:
        """Returns a scan of the live requests that match and arrived after number ``after``; -1 for all."""
        return LiveRequestScan(self.requests, self._bisector.may_run, wanted, after)

    def load(self, state: EngineState) -> EngineLoad:
        """Returns how busy the scheduler is, for an engine in this state."""
        return EngineLoad(
            state=state,
            running=len(self.running),
            waiting=len(self.waiting) - self.waiting.num_warm_ups,
            kv_usage=self.kv.usage,
            predicted_ttft_s=self.predictor.short_ttft_s,
        )

    def _emit_so_far(self, live: RequestState) -> None:
        for sequence in live.sequences:
            live.timeline.so_far(sequence.index, self._planner.end_of(sequence), sequence.output.num_tokens)

    def abort(self, request_id: str, reason: EngineFinishReason, message: str = "") -> bool:
        """Ends a request early; returns False if it is not alive."""
        live = self.requests.get(request_id)
        if live is None:
            return False
        self._finish(live, reason, message)
        return True

    def abandon(self, reason: EngineFinishReason, message: str) -> None:
        """Ends every request without touching rows and blocks, which may be in any state. The scheduler is not used
        afterwards."""
        lives = list(self.requests.values())
        self.requests.clear()
        self.num_held = 0
        for live in lives:
            request_id, context = live.request.request_id, None
            deltas = self._output_processor.cut_short(live, reason)
            try:
                self._emit_so_far(live)
                context = self._close(live, reason)
            except Exception:
                logger.exception("request %s: its accounts could not be closed", request_id)
            try:
                self._report_finished(live, deltas, reason, message, context)
            except Exception:
                logger.exception("request %s: its end could not be reported", request_id)

    def _new_sequence(self, live: RequestState, index: int, rank: Rank) -> SequenceState:
        request = live.request
        hashes = self.kv.first_hashes(request.first_hashes(index))
        # All sequences have the first one's limit, even if the tenant's cap has changed since.
        max_tokens = (
            live.sequences[0].output.max_tokens if live.sequences else self._intake.admission.max_tokens(request)
        )
        sequence = SequenceState(live, index, rank, hashes, max_tokens)
        if self._repetition_search is not None:
            self._repetition_search.add_sequence(sequence)
        live.sequences.append(sequence)
        return sequence

    def _fork(self, live: RequestState) -> None:
        """Forks a request whose prompt is computed, or planned: its other sequences share the prompt's full blocks."""
        live.forked = True
        for index in range(1, live.request.n):
            rank = self._intake.rank(live.request, live.place, index, live.work)
            self._planner.enter(self._new_sequence(live, index, rank), forked_from=live.sequences[0])

    def _finish(self, live: RequestState, reason: EngineFinishReason, message: str) -> None:
        deltas = self._output_processor.cut_short(live, reason)
        # If the accounting fails here, the request is still known, and ``abandon`` reports its end.
        for sequence in live.sequences:
            if sequence.state is not SequenceStatus.ENDED:
                self._planner.retire(sequence)
        self._bisector.drop_request(live.request.request_id)
        self.predictor.ended(live, reason)
        context = self._close(live, reason)
        del self.requests[live.request.request_id]
        self.num_held -= live.held
        self._report_finished(live, deltas, reason, message, context)

    def _close(self, live: RequestState, reason: EngineFinishReason) -> Context | None:
        """Closes a request's accounts; returns the context for requests that continue it."""
        request = live.request
        self.tenants.leave(live.tenant, request)
        self._intake.grammar_budget.count(request, -1)
        live.timeline.ended(reason)
        if not request.is_warm_up:
            self._ended_timelines.add(live.timeline)
        context = live.context(reason, self.kv.block_size)
        if context is not None and request.retain_s > 0:
            kind = LeaseKind.AHEAD if request.is_warm_up else LeaseKind.CONTEXT
            self.kv.retain(context.block_hashes, self._clock() + request.retain_s, request.tenant, kind)
        return context

    def _report_finished(
        self,
        live: RequestState,
        deltas: Sequence[SequenceDelta],
        reason: EngineFinishReason,
        message: str,
        context: Context | None,
    ) -> None:
        """Delivers the last deltas and the end of a request that is no longer known."""
        try:
            for delta in deltas:
                live.request.sink(delta)
            live.request.sink(live.finished(reason, message, context, self._clock()))
        finally:
            live.sequences.clear()  # breaks a reference cycle, which would stay until the garbage collector runs
            self._on_finished(live.request)

    def schedule(self) -> StepPlan | None:
        """Returns the next plan, which must be submitted at once; None if there is nothing to do, or too many plans are
        in flight."""
        if len(self._in_flight) >= self._context.max_plans_in_flight:
            return None
        while True:
            plan = self._planner.plan()
            if plan is not None:
                self._record_planned(plan)
            late = self._planner.prefill_adder.take_late()
            for live in late:
                # It may have ended, because it may be found twice, or may have begun after all, once there was room.
                if live.started_at is None:
                    message = "the deadline could no longer be met when its turn came"
                    self.abort(live.request.request_id, EngineFinishReason.DEADLINE, message)
            if plan is not None or not late:  # otherwise a later request may begin
                return plan

    def _record_planned(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)
        self.predictor.planned(plan)
        for chunk in plan.chunks:
            live = self._planner.rows.current(chunk.row).live
            if not live.forked and chunk.end >= len(live.request.prompt_token_ids):
                self._fork(live)

    def update(self, result: StepResult) -> None:
        """Applies the result of the oldest plan in flight."""
        plan = self._in_flight.popleft()
        assert result.step == plan.step, f"the result is for step {result.step}, but {plan.step} is next"
        num_rows = len(plan.chunks) + len(plan.decodes)
        assert len(result.rows) == num_rows, f"step {plan.step} has {num_rows} rows; its result has {len(result.rows)}"
        self.predictor.answered(result)
        self.adapters.answered = result.step
        for part in result.prompt_logprobs:
            self._apply_prompt_logprobs(part)
        for chunk in plan.chunks:
            sequence = self._planner.rows.current(chunk.row)
            if sequence.row == chunk.row and chunk.end == sequence.prefill_end and not sequence.is_pooled:
                sequence.live.timeline.decodes(sequence.index, plan.step)
        for row in result.rows:
            self._output_processor.apply(row)
        if self._repetition_search is not None:
            self._repetition_search.look(result.computed_us * 1e-6)
        self.tenants.charge_new()
        self._planner.rows.reclaim(plan.dropped)
        if self._bisector:
            self._bisector.answered(self._progress(plan))

    def recover(self, blames_step: bool) -> None:
        """Makes all rows wait for the next worker. The last worker is gone, and all its results are applied.

        ``blames_step``: a request in the oldest step without a result may be the cause.
        """
        fatal = self._progress(self._in_flight[0]) if blames_step and self._in_flight else {}
        running = {sequence.live for sequence in self.running}
        self._in_flight.clear()
        self.predictor.restart()
        self.adapters.reset()
        self._planner.restart()
        for live in self.requests.values():
            live.expected_s = None
        for live in running:
            live.timings.restarts += 1
            live.timeline.restarted(self.counters.steps)
        for sequence in list(self.waiting):
            sequence.live.timeline.waits(sequence.index, WaitCause.WORKER)
            self._output_processor.inject_due(sequence)
        for request_id in self._bisector.crashed(fatal) if fatal else []:
            logger.error("request %s crashed the worker twice while it ran alone; it is refused", request_id)
            self.abort(request_id, EngineFinishReason.KILLED_WORKER)
        for request_id in fatal.keys() - self.requests.keys():
            self._bisector.drop_request(request_id)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Applies ``config`` from the next plan on, except for settings that are fixed at the start; no request is
        lost. Raises ValueError, without changing anything."""
        config.check_fits(self._context.facts, self._context.config)
        self._context.configure(config)
        self.tenants.reconfigure(config)
        self._ended_timelines.resize(config.explain_requests)
        for live in self.requests.values():
            rank = self._intake.rank(live.request, live.place, 0, live.work)
            for sequence in live.sequences:
                sequence.rank = (*rank[:3], sequence.index)
        self._planner.reconfigure()
        self.predictor.reconfigure()

    def _progress(self, plan: StepPlan) -> dict[str, int]:
        """Returns the requests of a plan, and their progress."""
        rows = [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]
        lives = dict.fromkeys(self._planner.rows.current(row).live for row in rows)
        return {live.request.request_id: live.progress for live in lives}

    def _apply_prompt_logprobs(self, part: PromptLogprobsPart) -> None:
        live = self._planner.rows.holder(part.row, part.epoch).live
        if live.request.request_id not in self.requests:
            return
        new = live.new_prompt_logprobs(part)
        if new is not None:
            live.request.sink(new)
