"""Tracks what remains of a tenant's limits: a rate of requests, a separate rate of tokenizer calls, and a token budget.

Each is a token bucket (RFC 2697) in its simplest form: it holds at most ``capacity`` and gains ``per_s`` per second.
Usage that is only known afterwards, an output, is taken even if the bucket goes below zero; later requests wait until
it is refilled. The caller passes the time, by ``time.monotonic()``.
"""

from enum import Enum, auto

from penstock.scheduler.config import TenantLimits

MIN_BURST = 1.0
"""The number of requests that may arrive at once, however low the rate is."""
_S_PER_MINUTE = 60.0


class Rated(Enum):
    """What ``requests_per_second`` limits, each separately."""

    REQUEST = auto()
    """A request to generate or to embed; counted when it arrives, so a refused request counts as well."""
    TOKENIZER_CALL = auto()
    """A call that turns text into tokens or tokens into text. A gateway may make one for a request, which must not
    count twice."""


class TokenBucket:
    """A token bucket, which starts full."""

    __slots__ = ("_at", "_level", "capacity", "per_s")

    def __init__(self, capacity: float, per_s: float, now: float) -> None:
        self.capacity = capacity
        self.per_s = per_s
        self._level = capacity
        self._at = now

    def level(self, now: float) -> float:
        """Returns the content; a negative value is a debt."""
        self._level = min(self.capacity, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level

    def take_tokens(self, amount: float, now: float) -> None:
        """Takes ``amount``, even if the bucket has less."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Returns the time until the bucket has ``amount`` or is full; 0 if it has enough."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self.per_s)

    def resize(self, capacity: float, per_s: float, now: float) -> None:
        """Changes the size. A debt stays, and a larger bucket starts with what was left in the smaller one."""
        self._level = min(capacity, self.level(now))
        self.capacity, self.per_s = capacity, per_s


class TenantRateLimit:
    """A tenant's buckets, one for each limit that is set."""

    __slots__ = ("_rates", "_tokens")

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self._rates: dict[Rated, TokenBucket | None] = dict.fromkeys(Rated)
        self._tokens: TokenBucket | None = None
        self.reconfigure(limits, now)

    def reconfigure(self, limits: TenantLimits, now: float) -> None:
        """Applies new limits from now on."""
        rate, budget = limits.requests_per_second, limits.tokens_per_minute
        burst = None if rate is None else max(MIN_BURST, rate)
        self._rates = {kind: _sized(bucket, burst, rate, now) for kind, bucket in self._rates.items()}
        self._tokens = _sized(self._tokens, budget, None if budget is None else budget / _S_PER_MINUTE, now)

    def wait_s(self, kind: Rated, now: float) -> float:
        """Returns the time until one more request or call is allowed."""
        bucket = self._rates[kind]
        return 0.0 if bucket is None else bucket.wait_s(1.0, now)

    def token_wait_s(self, num_tokens: int, now: float) -> float:
        """Returns the time until this many tokens are available, or the bucket is full."""
        return 0.0 if self._tokens is None else self._tokens.wait_s(num_tokens, now)

    def take_from(self, kind: Rated, now: float) -> None:
        """Takes one from a rate."""
        bucket = self._rates[kind]
        if bucket is not None:
            bucket.take_tokens(1.0, now)

    def take_tokens(self, num_tokens: int, now: float) -> None:
        """Takes used tokens."""
        if self._tokens is not None:
            self._tokens.take_tokens(num_tokens, now)

    def is_full(self, now: float) -> bool:
        """Returns whether a new object would be the same: all buckets are full."""
        buckets = (*self._rates.values(), self._tokens)
        return all(bucket is None or bucket.level(now) >= bucket.capacity for bucket in buckets)


def _sized(bucket: TokenBucket | None, capacity: float | None, per_s: float | None, now: float) -> TokenBucket | None:
    if capacity is None or per_s is None:
        return None
    if bucket is None:
        return TokenBucket(capacity, per_s, now)
    bucket.resize(capacity, per_s, now)
    return bucket
