"""Decides whether a request may enter the queue. It reads limits and counts, and changes nothing."""

import math

from penstock.scheduler.config import RETRY_AFTER_MS
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.rate_limit import Rated, TenantRateLimit
from penstock.scheduler.planning.sequence import RequestState
from penstock.scheduler.planning.tenants import RequestCount
from penstock.scheduler.request import RefusalKind, Refused, Request
from penstock.scheduler.timing.queue_time import Prediction

MIN_RETRY_AFTER_MS = 50
"""The shortest time that a refusal names, whatever is predicted."""
MAX_QUEUED_POOLED = 1 << 16
"""The maximum number of waiting prompts to embed or classify, unless a single request has more. Each is a sequence,
however short."""

MAX_WARM_UPS = 1024
"""The maximum number of unfinished warm-ups. Their prompts have the same token limit as the queue."""


class AdmissionControl:
    """Limits the queue and each tenant, and refuses at once requests that can never run or would be too late."""

    def __init__(self, context: PlanningContext) -> None:
        self._context = context

    def max_tokens(self, request: Request, num_injected: int = 0) -> int:
        """Returns the output tokens of a sequence: limited by the model's context, by the KV cache if tokens are
        injected, and by the tenant's cap if ``max_tokens`` is a default."""
        facts, num_input = self._context.facts, len(request.prompt_token_ids) + num_injected
        max_tokens = min(request.max_tokens, facts.max_model_len - num_input)
        if num_injected:  # the last output token is never computed: nothing follows it
            max_tokens = min(max_tokens, facts.longest_in_cache + 1 - num_input)
        cap = self._context.config.tenant(request.tenant).max_tokens
        return min(max_tokens, cap) if cap is not None and request.max_tokens_is_default else max_tokens

    def check(
        self,
        request: Request,
        prediction: Prediction | None,
        alone_s: float | None,
        *,
        is_first: bool = False,
        superseded: RequestState | None = None,
    ) -> None:
        """Raises Refused if the request may not enter the queue. ``alone_s`` is the time that it takes when it runs
        alone. Without a prediction, no request is refused as too late. ``is_first``: there is no other request. It is
        then not refused for its deadline, because retrying cannot help and nothing would be learned. The room of
        ``superseded`` is free for it."""
        max_model_len, now = self._context.facts.max_model_len, self._context.clock()
        if request.pooling is None:
            assert 0 < request.num_prompt_tokens < max_model_len, "the prompt's length is checked before admission"
            assert request.max_tokens > 0
        else:
            assert request.n == request.num_prompts
            assert request.max_tokens == 0
            assert request.longest_prompt <= max_model_len, "lengths are checked before admission"
        if request.deadline is not None and request.deadline <= now:
            raise Refused(RefusalKind.DEADLINE, "the deadline had passed when the request arrived")
        self.check_size(request)
        if request.is_warm_up:
            self._check_warm_ups(request)
        else:
            self._check_tenant(request, superseded)
        check_rate(Rated.TOKEN, request.num_charged_tokens, self._context.tenants.rate_limit(request.tenant), now)
        if not request.is_warm_up:
            self._check_queue(request, superseded)
        if request.first_token_target is not None:
            _check_target(request.first_token_target - now, prediction, may_retry=not is_first)
        if request.deadline is not None and prediction is not None and not is_first:
            _check_deadline(request.deadline - now, prediction, alone_s)

    def check_size(self, request: Request) -> None:
        """Raises Refused if the request can never be served: it exceeds its tenant's caps or the size of the KV
        cache."""
        limits, facts = self._context.config.tenant(request.tenant), self._context.facts
        num_prompt_tokens, max_tokens = request.longest_prompt, self.max_tokens(request)
        if limits.max_prompt_tokens is not None and num_prompt_tokens > limits.max_prompt_tokens:
            raise Refused(
                RefusalKind.TENANT_CAP,
                f"the prompt has {num_prompt_tokens} tokens; this tenant's may have at most {limits.max_prompt_tokens}",
            )
        if limits.max_tokens is not None and max_tokens > limits.max_tokens:
            raise Refused(
                RefusalKind.TENANT_CAP,
                f"max_tokens is {max_tokens}; this tenant's may be at most {limits.max_tokens}",
            )
        # The last output token is never computed: nothing follows it.
        num_slots = num_prompt_tokens + max(0, max_tokens - 1)
        if facts.groups.num_blocks_for(num_slots) > facts.num_blocks:
            raise Refused(
                RefusalKind.TOO_LARGE,
                f"prompt and max_tokens need {num_slots} tokens of KV cache, which holds "
                f"{facts.longest_in_cache}; shorten the prompt or lower max_tokens",
            )

    def check_injection(self, live: RequestState, num_tokens: int) -> None:
        """Raises Refused if this many more tokens may not be injected into a live request."""
        request = live.request
        if request.n > 1 or request.pooling is not None or request.grammar:
            what = "a constraint" if request.grammar else "several choices"
            raise Refused(RefusalKind.NOT_INJECTABLE, f"nothing can be injected into a request with {what}")
        sequence = live.sequences[0]
        num_injected = sequence.num_injected + len(sequence.to_inject) + num_tokens
        num_input = len(request.prompt_token_ids) + num_injected
        limits = self._context.config.tenant(request.tenant)
        if limits.max_prompt_tokens is not None and num_input > limits.max_prompt_tokens:
            raise Refused(
                RefusalKind.TENANT_CAP,
                f"prompt and injected tokens would be {num_input}; this tenant's may be at most "
                f"{limits.max_prompt_tokens}",
            )
        room = self.max_tokens(request, num_injected)
        # An output that is about to reach its own limit may end before; that is no lack of room.
        if room < sequence.output.max_tokens and room <= sequence.length_bound - sequence.num_input_tokens:
            raise Refused(
                RefusalKind.CONTEXT_LENGTH,
                f"{num_tokens} more tokens leave no room for output in the model's context or the KV cache",
            )
        check_rate(Rated.TOKEN, num_tokens, self._context.tenants.rate_limit(request.tenant), self._context.clock())

    def _check_warm_ups(self, request: Request) -> None:
        """Limits the unfinished warm-ups. A tenant may use half of the room that the others leave."""
        tenants = self._context.tenants
        total, own = tenants.warm_ups, tenants.warm_ups_of(request.tenant)
        more = own.plus(1, request.num_prompt_tokens)
        most = RequestCount(MAX_WARM_UPS, self._context.config.max_queued_tokens)
        left = most.plus(own.requests - total.requests, own.tokens - total.tokens)
        if own.requests and (2 * more.requests > left.requests or 2 * more.tokens > left.tokens):
            message = f"this tenant's prompts that are computed ahead: {own.requests:,}"
            raise Refused(RefusalKind.QUEUE_FULL, message, RETRY_AFTER_MS)

    def _check_queue(self, request: Request, superseded: RequestState | None) -> None:
        config, waiting, num_tokens = self._context.config, self._context.waiting, request.num_queued_tokens
        gone = _queued(superseded)
        if not self._is_within_share(request, gone):
            queued = waiting.queued.minus(gone)
            if queued.requests + 1 > config.max_queued_requests:
                message = f"requests already waiting: {queued.requests}"
                raise Refused(RefusalKind.QUEUE_FULL, message, RETRY_AFTER_MS)
            if queued.tokens + num_tokens > config.max_queued_tokens:
                raise Refused(
                    RefusalKind.QUEUE_FULL,
                    f"{queued.tokens} prompt tokens are waiting, and {num_tokens} more would exceed the limit",
                    None if num_tokens > config.max_queued_tokens else RETRY_AFTER_MS,
                )
        num_pooled = waiting.num_pooled
        if request.pooling is not None and num_pooled and num_pooled + request.num_prompts > MAX_QUEUED_POOLED:
            raise Refused(
                RefusalKind.QUEUE_FULL, f"waiting prompts to embed or classify: {num_pooled:,}", RETRY_AFTER_MS
            )

    def _is_within_share(self, request: Request, gone: RequestCount) -> bool:
        """Returns whether the tenant's share of the queue has room, not counting the requests that are ``gone``. Where
        tenants take turns, a tenant may fill its share even if others have filled all of the queue."""
        config, waiting = self._context.config, self._context.waiting
        if not waiting.by_turns:
            return False
        share = self._context.tenants.share_of(request.tenant)
        requests, tokens = waiting.queued_of(request.tenant).minus(gone).plus(1, request.num_queued_tokens)
        return requests <= share * config.max_queued_requests and tokens <= share * config.max_queued_tokens

    def _check_tenant(self, request: Request, superseded: RequestState | None) -> None:
        most = self._context.config.tenant(request.tenant).max_live_requests
        num_live = self._context.tenants.num_live(request.tenant) - (superseded is not None)
        if most is not None and num_live >= most:
            raise Refused(
                RefusalKind.TENANT_BUSY,
                f"this tenant's requests at a time: {num_live:,}, at most {most:,}; try again when one has ended",
                RETRY_AFTER_MS,
            )


def _queued(live: RequestState | None) -> RequestCount:
    """Returns what a request adds to the size of the queue."""
    return (
        RequestCount()
        if live is None or live.started_at is not None
        else RequestCount(1, live.request.num_queued_tokens)
    )


_EXCEEDED = {
    Rated.REQUEST: (RefusalKind.TENANT_RATE, "exceeds its rate of requests"),
    Rated.TOKENIZER_CALL: (RefusalKind.TENANT_RATE, "exceeds its rate of tokenizer calls"),
    Rated.TOKEN: (RefusalKind.TENANT_TOKENS, "has used its tokens of this minute"),
}


def check_rate(kind: Rated, amount: int, rate_limit: TenantRateLimit, now: float) -> None:
    """Raises Refused if too little of the rate is left, with the time after which there is enough if nothing else is
    used before."""
    wait_s = rate_limit.wait_s(kind, amount, now)
    if wait_s > 0:
        refusal, what = _EXCEEDED[kind]
        raise Refused(refusal, f"this tenant {what}; try again in {wait_s:.3g} s", _retry_after_ms(wait_s))


def _retry_after_ms(wait_s: float) -> int:
    return max(MIN_RETRY_AFTER_MS, math.ceil(wait_s * 1000))


def _check_deadline(left_s: float, prediction: Prediction, alone_s: float | None) -> None:
    """Raises Refused if the request is predicted to miss its deadline.

    If it would miss the deadline even when running alone, the deadline cuts it in any case: its caller gets the output
    up to then, so only the first token must be in time.
    """
    is_cut = alone_s is not None and alone_s > left_s
    needed_s = prediction.ttft_s if is_cut else prediction.latest_s
    if needed_s > left_s:
        what = "its first token would come" if is_cut else "it might be done"
        raise Refused(
            RefusalKind.OVERLOADED,
            f"{what} in {needed_s:.3g} s, and its deadline is in {left_s:.3g} s; try again, or allow it more time",
            _retry_after_ms(needed_s - left_s),
        )


def _check_target(left_s: float, prediction: Prediction | None, *, may_retry: bool) -> None:
    """Raises Refused if the first token of a request is predicted to come later than its target."""
    needed_s = 0.0 if prediction is None else prediction.ttft_s
    if needed_s > left_s:
        comes = f"its first token would come in {needed_s:.3g} s" if needed_s else "it could not be queued earlier"
        target = f"the target is in {left_s:.3g} s" if left_s > 0 else f"the target was {-left_s:.3g} s ago"
        raise Refused(
            RefusalKind.OVERLOADED,
            f"{comes}, and {target}; retry, use another replica, or allow it more time",
            _retry_after_ms(needed_s - left_s) if may_retry else None,
        )
