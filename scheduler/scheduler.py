"""Decides what runs next: ``schedule`` makes a plan, ``update`` commits an answer. Synchronous, and knows no worker.

There are no phases. A row's history is longer than what is computed of it, and a step lets some rows catch up within a
budget. Two things make that safe while two plans are unanswered:

- Plans run in order, so order is the fence for memory. A block that is free when a plan is made may be given out in it:
  all that was planned for its last holder runs before. And KV that a plan computes from known tokens may be read by
  every later plan, so the blocks of chunks are published as soon as their plan is closed. A decoding row's blocks are
  published when an answer confirms them, because until then nobody here knows their tokens.
- What is not answered counts. A row is never continued past its limit, counting the tokens in flight; and a preempted
  row first takes the token that is in flight, and only then begins again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

from penstock.kv.manager import ChainedHashing, KVCacheManager, NoHashing
from penstock.scheduler.admission import Admission
from penstock.scheduler.choice import Choice, ChoiceState, LiveRequest
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import PromptLogprobsPart, RowResult, StepPlan, StepResult, TokenLogprobs, WorkerFacts
from penstock.scheduler.planner import Counters, Planner
from penstock.scheduler.policy import rank_of
from penstock.scheduler.request import Accepted, FinishReason, PromptLogprobs, Request

logger = logging.getLogger(__name__)


class Scheduler:
    """Requests in, plans out; answers in, events out. A request's events go to its sink, at once and in order."""

    def __init__(
        self,
        facts: WorkerFacts,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[Request], None] = lambda _: None,
    ) -> None:
        hashing = ChainedHashing(facts.block_size) if config.enable_prefix_caching else NoHashing()
        self.kv = KVCacheManager(facts.num_blocks, facts.block_size, hashing)
        self._planner = Planner(
            self.kv,
            config.token_budget(facts),
            max_rows=config.max_rows(facts),
            max_decode_tokens=config.max_decode_tokens,
            clock=clock,
        )
        self._admission = Admission(
            config.max_queued_requests,
            config.max_queued_tokens,
            facts.num_blocks,
            facts.block_size,
            facts.max_model_len,
        )
        self._policy = config.policy
        self._max_plans_in_flight = config.max_plans_in_flight
        self._clock = clock
        self._on_finished = on_finished
        self._requests: dict[str, LiveRequest] = {}
        self._num_arrived = 0
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_requests(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Rows that run."""
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        """Choices that wait for a row."""
        return len(self._planner.waiting.choices)

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._planner.counters

    # Requests in and out ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes a request into the queue and tells its sink. Raises Refused."""
        assert request.request_id not in self._requests, "request ids are unique among live requests"
        waiting = self._planner.waiting
        self._admission.check(request, waiting.num_requests, waiting.num_tokens, self._clock())
        live = LiveRequest(request, self._num_arrived)
        choice = self._new_choice(live, 0, pinned=[])
        self._num_arrived += 1
        self._requests[request.request_id] = live
        position = waiting.put(choice)
        cached = 0
        if not live.wants_prompt_logprobs:
            cached = len(self.kv.find_prefix(choice.hashes, len(choice.token_ids))) * self.kv.block_size
        request.sink(Accepted(cached, position))

    def abort(self, request_id: str, reason: FinishReason, message: str = "") -> bool:
        """Ends a request early; False if it is not alive."""
        live = self._requests.get(request_id)
        if live is None:
            return False
        self._finish(live, reason, message)
        return True

    def abandon(self, reason: FinishReason, message: str) -> None:
        """Ends every request without touching rows and blocks, which may be in any state. Nothing may follow."""
        lives = list(self._requests.values())
        self._requests.clear()
        for live in lives:
            try:
                self._report_finished(live, reason, message)
            except Exception:
                logger.exception("request %s: nobody could be told of its end", live.request.request_id)

    def _new_choice(self, live: LiveRequest, index: int, pinned: list[int]) -> Choice:
        request = live.request
        rank = rank_of(self._policy, request, live.number, index)
        hashes = self.kv.hashing.first(request.block_hashes)
        choice = Choice(live, index, rank, hashes, self._admission.max_tokens(request), pinned)
        live.choices.append(choice)
        return choice

    def _fork(self, live: LiveRequest) -> None:
        """The prompt is computed, in a plan or before it: the other choices share its full blocks."""
        live.forked = True
        first = live.choices[0]
        shared = first.block_ids[: (first.num_prompt_tokens - 1) // self.kv.block_size]
        for index in range(1, live.request.n):
            self._planner.pin(self._new_choice(live, index, shared.copy()))

    def _finish(self, live: LiveRequest, reason: FinishReason, message: str = "") -> None:
        # Should our own bookkeeping fail here, the request is still known, and told of its end by ``abandon``.
        for choice in live.choices:
            if choice.state is not ChoiceState.ENDED:
                self._planner.retire(choice)
        del self._requests[live.request.request_id]
        self._report_finished(live, reason, message)

    def _report_finished(self, live: LiveRequest, reason: FinishReason, message: str) -> None:
        try:
            live.request.sink(live.finished(reason, message, self._clock()))
        finally:
            self._on_finished(live.request)

    # A step ---------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, to be submitted at once; None if there is nothing to do, or too much unanswered."""
        if len(self._in_flight) >= self._max_plans_in_flight:
            return None
        plan = self._planner.plan()
        if plan is None:
            return None
        self._in_flight.append(plan)
        for chunk in plan.chunks:
            live = self._planner.rows.current(chunk.row).live
            if not live.forked and chunk.end >= len(live.request.prompt_token_ids):
                self._fork(live)
        return plan

    def update(self, result: StepResult) -> None:
        """Commits the answer to the oldest plan in flight."""
        plan = self._in_flight.popleft()
        assert result.step == plan.step, f"step {result.step} is answered, but {plan.step} is next"
        num_rows = len(plan.chunks) + len(plan.decodes)
        assert len(result.rows) == num_rows, f"step {plan.step} has {num_rows} rows; {len(result.rows)} are answered"
        for part in result.prompt_logprobs:
            self._apply_prompt_logprobs(part)
        for row in result.rows:
            self._apply(row)
        self._planner.rows.reclaim(plan.dropped)

    def _apply(self, row: RowResult) -> None:
        choice = self._planner.rows.holder(row.row, row.epoch)
        max_tokens = choice.in_flight.popleft()
        if choice.state is ChoiceState.ENDED:
            return
        token_ids = row.token_ids
        num_tokens = len(token_ids)
        assert num_tokens <= max_tokens, f"row {row.row} is answered with {num_tokens} tokens"
        assert num_tokens or not max_tokens, f"row {row.row} is answered with no token"
        choice.length_bound -= max_tokens - num_tokens
        choice.token_ids += token_ids
        # After preemption the row has no KV here any more, or none yet; its tokens are as good as ever.
        if choice.row == row.row:
            if num_tokens:
                assert row.num_computed == len(choice.token_ids) - 1, f"row {row.row} is out of step with its worker"
            else:
                assert row.num_computed <= choice.num_planned, f"row {row.row} is ahead of its plans"
            choice.num_computed = row.num_computed
            self._planner.publish_confirmed(choice)
        if num_tokens:
            self.counters.output_tokens += num_tokens
            self._deliver(choice, token_ids, row.logprobs)

    def _deliver(self, choice: Choice, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        live = choice.live
        if live.first_token_at is None:
            live.first_token_at = self._clock()
        delivery = choice.delivery
        try:
            delta = delivery.take(token_ids, logprobs)
        except Exception:
            # The text state is not ours; what it cannot do must not end the other requests.
            logger.exception("request %s: its tokens could not be turned into text", live.request.request_id)
            self._finish(live, FinishReason.INTERNAL, "the output could not be turned into text")
            return
        if delta is not None:
            live.request.sink(delta)
        # The sink may have aborted the request.
        if delivery.end is not None and choice.state is not ChoiceState.ENDED:
            self._planner.retire(choice)
            live.num_ended += 1
            if live.num_ended == live.request.n:
                self._finish(live, delivery.end.reason)

    def _apply_prompt_logprobs(self, part: PromptLogprobsPart) -> None:
        live = self._planner.rows.holder(part.row, part.epoch).live
        if live.request.request_id not in self._requests:
            return
        # A row that began again computes again what was reported before its preemption.
        num_known = live.num_prompt_logprobs - part.start
        assert num_known >= 0, f"log-probabilities of the prompt are missing before position {part.start}"
        logprobs = part.logprobs
        if num_known >= len(logprobs.chosen):
            return
        num_entries = num_known * logprobs.num_top
        new = TokenLogprobs(
            logprobs.num_top,
            logprobs.chosen[num_known:],
            logprobs.top_token_ids[num_entries:],
            logprobs.top[num_entries:],
        )
        start = live.num_prompt_logprobs
        live.num_prompt_logprobs += len(new.chosen)
        live.request.sink(PromptLogprobs(start, new))
