"""Each tenant's state: its turn under the ``fair`` policy, what remains of its rates, and the counts for caps and
statistics.

A turn is the number of tokens that a tenant was served, divided by its weight (the virtual counter of Sheng et al.,
"Fairness in Serving Large Language Models", OSDI 2024). The tenant with the lowest turn goes next. A tenant with
nothing in the queue saves up little: when it sends a request, its turn is raised to just below the lowest turn of those
that wait, or that of the last one that began. Work is never held back for a tenant that has none. Apart from the number
of each tenant's rows, this module knows neither blocks nor rows.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.planning.rate_limit import Rated, TenantRateLimit
from penstock.scheduler.policy import Rank
from penstock.scheduler.request import Request

MAX_REMEMBERED = 4096
"""The number of tenants without a live request whose turns are kept."""
MAX_SAVED_TOKENS = 2048
"""The maximum that a tenant may save up: one or two requests of a tenant that uses less than its share go first."""


class RequestCount(NamedTuple):
    """A number of requests, and of the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0

    def plus(self, requests: int, tokens: int) -> "RequestCount":
        return RequestCount(self.requests + requests, self.tokens + tokens)

    def minus(self, other: "RequestCount") -> "RequestCount":
        return self.plus(-other.requests, -other.tokens)


class TenantUse:
    """The state of one tenant."""

    def __init__(self, name: str, limits: TenantLimits, now: float) -> None:
        self.name = name
        self.limits = limits
        self.rate_limit = TenantRateLimit(limits, now)
        self.num_live = 0
        """Requests that have not finished, except warm-ups."""
        self.warm_ups = RequestCount()
        """Warm-ups that have not finished."""
        self.num_rows = 0
        """Running rows of its requests."""
        self.num_waiting = 0
        """Sequences in the queue."""
        self.served = 0
        """Tokens computed for its prompts and chosen for its outputs."""
        self.turn = 0.0
        self.num_new = 0
        """Tokens that a step chose for it and that are not charged yet."""
        self.last_in_share: Rank = (-math.inf, 0.0, 0, 0)
        """The rank of the last row that had a part of its share of a step, while others had to sit out."""
        self.saved_s = 0.0
        """What it left of its share of a step, for later ones."""
        self.saved_at = -1
        """The number of that step."""

    @property
    def is_busy(self) -> bool:
        """Whether any request or warm-up has not finished."""
        return self.num_live > 0 or self.warm_ups.requests > 0

    def charge(self, num_tokens: int) -> None:
        self.served += num_tokens
        self.turn += num_tokens / self.limits.weight

    def charge_new(self, now: float) -> None:
        """Charges the tokens that were chosen for it recently."""
        if self.num_new:
            self.charge(self.num_new)
            self.rate_limit.take(Rated.TOKEN, self.num_new, now)
            self.num_new = 0


class TenantAccounting:
    """The tenants with live requests, and those whose turns are kept."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._uses: dict[str, TenantUse] = {}
        self._busy: dict[str, TenantUse] = {}
        self.last: TenantUse | None = None
        """The tenant that began last."""
        self.warm_ups = RequestCount()
        """The warm-ups of all tenants that have not finished."""
        self._total_weight = 0.0
        """The sum of the busy tenants' weights."""

    def __iter__(self) -> Iterator[TenantUse]:
        """Iterates over the tenants with live requests."""
        return iter(self._busy.values())

    def num_live(self, name: str) -> int:
        use = self._busy.get(name)
        return 0 if use is None else use.num_live

    def warm_ups_of(self, name: str) -> RequestCount:
        use = self._busy.get(name)
        return RequestCount() if use is None else use.warm_ups

    def rate_limit(self, name: str) -> TenantRateLimit:
        """Returns what remains of a tenant's rates; read-only."""
        use = self._uses.get(name)
        return TenantRateLimit(self._config.tenant(name), self._clock()) if use is None else use.rate_limit

    def charge(self, name: str, kind: Rated) -> None:
        """Counts a request or call against a tenant's rate, whatever its outcome."""
        if self._config.tenant(name).requests_per_second is None:
            return
        now = self._clock()
        self._use(name, now).rate_limit.take(kind, 1, now)
        self._forget_some()

    def enter(self, request: Request) -> TenantUse:
        """Counts a new request or warm-up, and charges its prompts to its tenant's token rate."""
        now, name = self._clock(), request.tenant
        use = self._use(name, now)
        use.rate_limit.take(Rated.TOKEN, request.num_charged_tokens, now)
        if not use.num_waiting:
            turns = [other.turn for other in self._busy.values() if other.num_waiting]
            last_turn = 0.0 if self.last is None else self.last.turn
            saved = MAX_SAVED_TOKENS / use.limits.weight
            use.turn = max(use.turn, min(turns, default=last_turn) - saved)
        if not use.is_busy:
            self._busy[name] = use
            self._total_weight += use.limits.weight
        self._count(use, request, 1)
        return use

    def charge_tokens(self, use: TenantUse, num_tokens: int) -> None:
        """Counts further prompt tokens of a live request against its tenant's rate."""
        use.rate_limit.take(Rated.TOKEN, num_tokens, self._clock())

    def leave(self, use: TenantUse, request: Request) -> None:
        """Counts the end of a request or warm-up."""
        self._count(use, request, -1)
        if use.is_busy:
            return
        use.charge_new(self._clock())
        del self._busy[use.name]
        # Summed again, so that no rounding error stays.
        self._total_weight = sum(other.limits.weight for other in self._busy.values())
        self._forget_some()

    def charge_new(self) -> None:
        """Charges the tokens that the last step chose."""
        now = self._clock()
        for use in self._busy.values():
            use.charge_new(now)

    def share(self, use: TenantUse) -> float:
        """Returns a busy tenant's share of all resources, 0 to 1."""
        return use.limits.weight / self._total_weight

    def share_of(self, name: str) -> float:
        """Returns a tenant's share, or the share that it would have if it had a request."""
        use = self._busy.get(name)
        if use is not None:
            return self.share(use)
        weight = self._config.tenant(name).weight
        return weight / (self._total_weight + weight)

    def share_beside(self, use: TenantUse, newcomer: str) -> float:
        """Returns a busy tenant's share once the newcomer has a request too."""
        return self.share(use) if newcomer in self._busy else self.share(use) * (1 - self.share_of(newcomer))

    def num_rows(self, name: str) -> int:
        use = self._busy.get(name)
        return 0 if use is None else use.num_rows

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Applies the weights and caps of ``config`` from now on. If the policy changes, all turns start from zero."""
        is_new_policy = config.policy is not self._config.policy
        self._config = config
        now = self._clock()
        for use in self._uses.values():
            use.limits = config.tenant(use.name)
            use.rate_limit.reconfigure(use.limits, now)
            if is_new_policy:
                use.turn = 0.0
        self._total_weight = sum(use.limits.weight for use in self._busy.values())

    def busiest(self, limit: int) -> list[TenantUse]:
        return heapq.nlargest(limit, self._busy.values(), key=lambda use: use.num_live)

    def _count(self, use: TenantUse, request: Request, sign: int) -> None:
        if request.is_warm_up:
            change = (sign, sign * request.num_prompt_tokens)
            use.warm_ups, self.warm_ups = use.warm_ups.plus(*change), self.warm_ups.plus(*change)
        else:
            use.num_live += sign

    def _use(self, name: str, now: float) -> TenantUse:
        use = self._uses.get(name)
        if use is None:
            use = self._uses[name] = TenantUse(name, self._config.tenant(name), now)
        return use

    def _forget_some(self) -> None:
        """Drops idle tenants if there are too many: first those with untouched rates, then those with the lowest turns,
        because these lose the least."""
        if len(self._uses) <= 2 * MAX_REMEMBERED:
            return
        now = self._clock()
        idle = [use for use in self._uses.values() if not use.is_busy]
        idle.sort(key=lambda use: (not use.rate_limit.is_full(now), use.turn))
        for use in idle[: max(0, len(idle) - MAX_REMEMBERED)]:
            del self._uses[use.name]
