"""Limits how fast the gateway refuses a tenant's requests: to the tenant's rate. The service counts the requests that
reach it."""

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_TENANTS = 4096
"""The limit of tenants; the least recently used one is dropped."""
_MIN_BURST = 1.0


class _Bucket:
    """A token bucket that holds the requests of one second, and at least one, like the service's."""

    def __init__(self, per_s: float, now: float) -> None:
        self.per_s = per_s
        self.level = self._capacity
        self._since = now

    @property
    def _capacity(self) -> float:
        return max(_MIN_BURST, self.per_s)

    def fill(self, now: float) -> None:
        self.level = min(self._capacity, self.level + self.per_s * (now - self._since))
        self._since = now


class RefusalRates:
    """Keeps a bucket for each tenant that has a rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def set(self, tenant: str, per_s: float | None) -> None:
        """Sets a tenant's rate from now on; None: no limit."""
        if per_s is None:
            self._buckets.pop(tenant, None)
            return
        bucket = self._buckets.get(tenant)
        if bucket is None or bucket.per_s != per_s:
            self._buckets[tenant] = _Bucket(per_s, self._clock())
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)

    def count(self, tenant: str) -> None:
        """Counts a request that was refused."""
        if (bucket := self._buckets.get(tenant)) is not None:
            bucket.fill(self._clock())
            bucket.level -= 1.0

    def wait_s(self, tenant: str) -> float:
        """Returns how long the tenant has to wait before its next request; 0: not at all."""
        if (bucket := self._buckets.get(tenant)) is None:
            return 0.0
        bucket.fill(self._clock())
        return max(0.0, (1.0 - bucket.level) / bucket.per_s)
