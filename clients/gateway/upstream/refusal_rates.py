"""Limits how fast the gateway refuses a tenant's requests: to the tenant's rate. The service counts the requests that
reach it."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_TENANTS = 4096
"""The limit of tenants; the least recently used one is dropped."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds the requests of one second, and at least one, like the service's."""

    per_s: float
    full_at: float = 0.0
    """When it is full again."""


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
            self._buckets[tenant] = _Bucket(per_s)
        self._buckets.move_to_end(tenant)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)

    def count(self, tenant: str) -> None:
        """Counts a request that was refused."""
        if (bucket := self._buckets.get(tenant)) is not None:
            bucket.full_at = max(bucket.full_at, self._clock()) + 1.0 / bucket.per_s

    def wait_s(self, tenant: str) -> float:
        """Returns the seconds that the tenant has to wait before its next request; 0 if it may send one now."""
        if (bucket := self._buckets.get(tenant)) is None:
            return 0.0
        full_s = max(1.0, bucket.per_s) / bucket.per_s  # in which an empty bucket fills
        return max(0.0, bucket.full_at - self._clock() + 1.0 / bucket.per_s - full_s)
