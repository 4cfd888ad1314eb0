"""Evaluates a new request: how much of it is cached, its rank and position, its predicted times, and whether it may
enter the queue. Counts refusals, and changes nothing else."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from penstock.scheduler.admission.control import AdmissionControl, check_rate
from penstock.scheduler.admission.grammar_budget import GrammarBudget
from penstock.scheduler.admission.latency_predictor import LatencyPredictor
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.planning.sequence import RequestState, SequenceState, SequenceStatus
from penstock.scheduler.policy import Place, Policy, Rank, may_follow, rank_of
from penstock.scheduler.request import Refused, Request
from penstock.scheduler.timing.queue_time import Prediction
from penstock.scheduler.timing.queued_work import QueuedWork, sequence_work, total_work

MAX_PASSED = 64
"""The maximum number of earlier requests that a request overtakes because its prompt is at hand."""
MIN_TO_COMPUTE = 4
"""A prompt is at hand if at most 1 in this many of its tokens must be computed."""


class _Found(NamedTuple):
    """What is cached of a prompt, and of the output that it resumes with, in blocks, except for ``num_tokens``."""

    num_tokens: int
    num_cached: int = 0
    num_held: int = 0
    """The number of cached blocks that running sequences hold."""
    num_evicted: int = 0
    """Blocks in the host tier that are worth copying back."""
    num_coming: int = 0
    """Blocks that are computed for requests ahead of it."""


def _work(request: Request, found: Sequence[_Found], block_size: int) -> QueuedWork:
    return total_work(
        [
            sequence_work(
                prompt.num_tokens,
                prompt.num_tokens - (prompt.num_cached + prompt.num_evicted + prompt.num_coming) * block_size,
                block_size,
                is_pooled=request.pooling is not None,
                num_evicted=prompt.num_evicted,
                num_shared=prompt.num_held + prompt.num_coming,
            )
            for prompt in found
        ]
    )


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """The rank, position and predictions with which a request enters the queue."""

    entered_at: float
    place: Place
    rank: Rank
    """The rank of its first sequence."""
    num_cached_tokens: int
    """The tokens of its prompts that are cached now."""
    work: QueuedWork
    """The work that is neither cached nor done for a request ahead of it."""
    position: int
    """The number of sequences before it."""
    prediction: Prediction | None


class RequestIntake:
    """Validates a new request and decides whether to queue it. Reads the planner and the tenants; owns neither."""

    def __init__(
        self,
        context: PlanningContext,
        planner: Planner,
        predictor: LatencyPredictor,
        requests: dict[str, RequestState],
    ) -> None:
        """``requests`` are the live ones, in order of arrival."""
        self.admission = AdmissionControl(context)
        self.grammar_budget = GrammarBudget()
        self._context = context
        self._kv = context.kv
        self._planner = planner
        self._predictor = predictor
        self._requests = requests

    def rank(self, request: Request, place: Place, choice: int, work: QueuedWork) -> Rank:
        """Returns the rank of one sequence of the request at ``place``, which needs this much ``work``."""
        policy = self._context.config.policy
        predicted_s = self._predictor.service_s(request, work) or 0.0 if policy is Policy.DEADLINE else 0.0
        return rank_of(policy, request, predicted_s, place, choice)

    def check_rates(self, tenant: str, kind: Rated) -> None:
        """Raises Refused, before any work is done, if a tenant has used up its rate or, for a request, its tokens."""
        rate_limit, now = self._context.tenants.rate_limit(tenant), self._context.clock()
        try:
            check_rate(kind, 1, rate_limit, now)
            if kind is Rated.REQUEST:
                check_rate(Rated.TOKEN, 1, rate_limit, now)
        except Refused:
            self._context.counters.refused += 1
            raise

    def check_injection(self, live: RequestState, num_tokens: int) -> None:
        """Raises Refused if this many more tokens may not be injected into a live request."""
        try:
            self.admission.check_injection(live, num_tokens)
        except Refused:
            self._context.counters.refused += 1
            raise

    def examine(
        self, request: Request, number: int, *, is_first: bool, superseded: RequestState | None = None
    ) -> AdmissionDecision:
        """Returns how the request enters the queue as number ``number``, in place of ``superseded``, which is still
        live; ``is_first``: there is no other request. Raises Refused."""
        found = [self._find(request, index) for index in range(request.num_entering)]
        cached_work = _work(request, found, self._kv.block_size)
        entered_at = self._context.clock()
        place = Place(entered_at, 2 * number)
        if self._is_at_hand(request, found[0]):
            place = self._earlier_place(place)
        if superseded is not None:
            place = self._place_of(superseded, request, place)
        rank = self.rank(request, place, 0, cached_work)
        position = self._context.waiting.num_ahead(request.tenant, rank)
        work = self._work_left(request, found, rank) if request.reads_cache else cached_work
        would_make_room = self._planner.would_make_room(request.tenant, rank)
        prediction = self._predictor.predict(request, work, rank, would_make_room)
        known = None if self._predictor.needs_test else prediction
        self._admit(request, cached_work, known, superseded, is_first=is_first)
        num_found = sum(prompt.num_cached + prompt.num_evicted for prompt in found[: request.num_prompts])
        num_cached = min(num_found * self._kv.block_size, request.num_prompt_tokens)  # resumed output may be cached too
        return AdmissionDecision(entered_at, place, rank, num_cached, work, position, prediction)

    def _earlier_place(self, place: Place) -> Place:
        """Returns the place of a request whose prompt is at hand: before some that arrived earlier but need more
        computation. Otherwise its retained blocks would take up room for as long as it waits. It passes no request
        with a target for its first token, and none that arrived before such a request."""
        earliest, number = place.entered_at, place.number - 2 * MAX_PASSED - 1
        for live in reversed(self._requests.values()):
            if 2 * live.number < number:
                break
            if live.started_at is None and not live.request.is_warm_up:
                if live.request.first_token_target is not None:
                    break
                earliest = live.entered_at
        return Place(earliest, number)

    def _place_of(self, superseded: RequestState, request: Request, place: Place) -> Place:
        """Returns the place of the request that this one supersedes, if that one has not begun and was no less urgent:
        a caller that changes a request must not go to the end of the queue. Otherwise returns ``place``."""
        is_by_priority = self._context.config.policy is Policy.PRIORITY
        is_more_urgent = is_by_priority and request.priority < superseded.request.priority
        return place if superseded.started_at is not None or is_more_urgent else min(place, superseded.place)

    def _is_at_hand(self, request: Request, found: _Found) -> bool:
        """Returns whether nearly all of the prompt is retained on the device."""
        if request.num_entering > 1 or request.is_warm_up:
            return False
        num_cached = found.num_cached * self._kv.block_size
        if found.num_tokens - num_cached > found.num_tokens // MIN_TO_COMPUTE:
            return False
        return self._kv.pool.is_retained(request.first_hashes(0)[found.num_cached - 1])

    def _find(self, request: Request, index: int) -> _Found:
        num_tokens = len(request.prompt(index).token_ids)
        if request.resumed:
            num_tokens += len(request.resumed[index].token_ids)
        if not request.reads_cache:
            return _Found(num_tokens)
        hashes = self._kv.first_hashes(request.first_hashes(index))
        prefix = self._kv.find_prefix(hashes, num_tokens)
        restored = self._planner.restore_policy.find(hashes, len(prefix), num_tokens)
        num_usable = self._kv.num_usable(hashes, len(prefix) + len(restored))
        num_cached = min(num_usable, len(prefix))
        num_held = sum(map(self._kv.pool.is_held, prefix[:num_cached]))
        return _Found(num_tokens, num_cached, num_held, num_usable - num_cached)

    def _work_left(self, request: Request, found: list[_Found], rank: Rank) -> QueuedWork:
        """Returns the work left once the requests ahead have computed the blocks that they share with it."""

        def is_ahead(other: Hashable) -> bool:
            sequence = cast(SequenceState, other)
            if sequence.state is SequenceStatus.WAITING:
                return sequence.rank < rank
            return may_follow(rank, sequence.rank, request.first_token_target)

        left: list[_Found] = []
        of_siblings: set[bytes] = set()
        for index, prompt in enumerate(found):
            hashes = self._kv.first_hashes(request.first_hashes(index))
            num_at_hand = prompt.num_cached + prompt.num_evicted
            num_coming = self._kv.num_coming(hashes, num_at_hand, prompt.num_tokens, is_ahead)
            if len(found) > 1:
                own = hashes[num_at_hand + num_coming : (prompt.num_tokens - 1) // self._kv.block_size]
                num_coming += sum(block_hash in of_siblings for block_hash in own)
                of_siblings.update(own)
            left.append(prompt._replace(num_coming=num_coming))
        return _work(request, left, self._kv.block_size)

    def _admit(
        self,
        request: Request,
        cached_work: QueuedWork,
        prediction: Prediction | None,
        superseded: RequestState | None,
        *,
        is_first: bool,
    ) -> None:
        try:
            self.grammar_budget.check(request)
            alone_s = self._predictor.alone_s(request, cached_work)
            self.admission.check(request, prediction, alone_s, is_first=is_first, superseded=superseded)
        except Refused:
            self._context.counters.refused += not request.is_warm_up
            raise
