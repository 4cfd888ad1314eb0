"""Refuses a request that repeats another one, by the caller's key for it."""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.service.errors import Reason, ServiceError

KEPT_S = 600.0
"""How long the key of a request that succeeded is kept."""
MAX_KEYS = 1 << 17
"""The maximum number of keys of ended requests. Above that, the tenant with the most keys loses its oldest one."""
MAX_FORGOTTEN = 64
"""The maximum number of keys that are forgotten when a request begins, which is on the event loop."""


@dataclass(slots=True)
class _KeyUse:
    request_id: str
    ended_at: float | None = None

    def has_ended_before(self, oldest: float) -> bool:
        return self.ended_at is not None and self.ended_at <= oldest


class _LargestTenants:
    """The number of keys of each tenant, and the tenants by their numbers. Every operation takes constant time."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._by_number: dict[int, dict[str, None]] = {}
        self._most = 0

    @property
    def first(self) -> str:
        """A tenant with the most keys."""
        return next(iter(self._by_number[self._most]))

    def add(self, tenant: str, change: int) -> None:
        """Adds 1 or -1 to the number of a tenant."""
        before = self._numbers.pop(tenant, 0)
        number = before + change
        if before:
            del self._by_number[before][tenant]
            if not self._by_number[before]:
                del self._by_number[before]
        if number:
            self._numbers[tenant] = number
            self._by_number.setdefault(number, {})[tenant] = None
        if number > self._most or self._most not in self._by_number:
            self._most = number  # the only tenant with the most keys has one less, and still has the most


class IdempotencyKeys:
    """The keys of live requests, and of those that succeeded a short time ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._live: dict[tuple[str, str], _KeyUse] = {}
        self._ended: OrderedDict[tuple[str, str], _KeyUse] = OrderedDict()
        """The keys of ended requests, the oldest first."""
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}
        """The same keys by tenant, the oldest first. Not plain dicts, which would iterate over deleted entries at the
        beginning."""
        self._largest = _LargestTenants()

    def begin(self, tenant: str, key: str, request_id: str) -> None:
        """Records the key of a request that begins. Raises ServiceError DUPLICATE_REQUEST if the tenant has used it."""
        oldest = self._clock() - KEPT_S
        self._expire(oldest)
        used = self._live.get((tenant, key)) or self._ended.get((tenant, key))
        if used is not None and used.has_ended_before(oldest):
            self._forget(tenant, key)
        elif used is not None:
            raise ServiceError(
                Reason.DUPLICATE_REQUEST,
                f"idempotency_key: request {used.request_id} has this key, and is live or has ended; read its output, "
                "or choose another key",
                field="idempotency_key",
                metadata={"request_id": used.request_id},
            )
        self._live[tenant, key] = _KeyUse(request_id)

    def end(self, tenant: str, key: str, request_id: str, *, succeeded: bool) -> None:
        """Records the end of a request. The key of one that failed may be used again. Does nothing if the key is that
        of another request."""
        used = self._live.get((tenant, key))
        if used is None or used.request_id != request_id:
            return
        del self._live[tenant, key]
        if succeeded:
            used.ended_at = self._clock()
            self._ended[tenant, key] = used
            self._of_tenant.setdefault(tenant, OrderedDict())[key] = None
            self._largest.add(tenant, 1)
            if len(self._ended) > self._max_keys:
                largest = self._largest.first
                self._forget(largest, next(iter(self._of_tenant[largest])))

    def _expire(self, oldest: float) -> None:
        """Forgets some of the keys of requests that ended before ``oldest``."""
        for (tenant, key), used in list(itertools.islice(self._ended.items(), MAX_FORGOTTEN)):
            if not used.has_ended_before(oldest):
                return
            self._forget(tenant, key)

    def _forget(self, tenant: str, key: str) -> None:
        del self._ended[tenant, key]
        keys = self._of_tenant[tenant]
        del keys[key]
        if not keys:
            del self._of_tenant[tenant]
        self._largest.add(tenant, -1)
