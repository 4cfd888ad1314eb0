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
    """What a tenant's rates limit, each separately: the first two are limited by ``requests_per_second``."""

    REQUEST = auto()
    """A request to generate or to embed; counted when it arrives, so a refused request counts as well."""
    TOKENIZER_CALL = auto()
    """A call that turns text into tokens or tokens into text. A gateway may make one for a request, which must not
    count twice."""
    TOKEN = auto()
    """A token of a prompt or of an output."""


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

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self._buckets: dict[Rated, TokenBucket] = {}
        self.reconfigure(limits, now)

    def reconfigure(self, limits: TenantLimits, now: float) -> None:
        """Applies new limits from now on."""
        rate, budget = limits.requests_per_second, limits.tokens_per_minute
        sizes: dict[Rated, tuple[float, float]] = {}
        if rate is not None:
            sizes |= dict.fromkeys((Rated.REQUEST, Rated.TOKENIZER_CALL), (max(MIN_BURST, rate), rate))
        if budget is not None:
            sizes[Rated.TOKEN] = (budget, budget / _S_PER_MINUTE)
        self._buckets = {kind: self._buckets.get(kind) or TokenBucket(*size, now) for kind, size in sizes.items()}
        for kind, bucket in self._buckets.items():
            bucket.resize(*sizes[kind], now)

    def wait_s(self, kind: Rated, amount: float, now: float) -> float:
        """Returns the time until this much is available, or its bucket is full."""
        bucket = self._buckets.get(kind)
        return 0.0 if bucket is None else bucket.wait_s(amount, now)

    def take(self, kind: Rated, amount: float, now: float) -> None:
        """Takes ``amount``, even if less is available."""
        bucket = self._buckets.get(kind)
        if bucket is not None:
            bucket.take_tokens(amount, now)

    def is_full(self, now: float) -> bool:
        """Returns whether a new object would be the same: all buckets are full."""
        return all(bucket.level(now) >= bucket.capacity for bucket in self._buckets.values())
