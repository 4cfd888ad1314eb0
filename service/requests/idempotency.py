"""Refuses a request that repeats another one, by the caller's key for it."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.service.errors import Reason, ServiceError

KEPT_S = 600.0
"""The time for which the key of a request that ended well is kept."""
MAX_KEYS = 1 << 17
"""The maximum number of keys of ended requests. The oldest go first."""


@dataclass(slots=True)
class _KeyUse:
    request_id: str
    ended_at: float | None = None


class IdempotencyKeys:
    """The keys of live requests, and of those that ended well a short time ago."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._live: dict[tuple[str, str], _KeyUse] = {}
        self._ended: OrderedDict[tuple[str, str], _KeyUse] = OrderedDict()
        """The keys of ended requests, the oldest first."""

    def begin(self, tenant: str, key: str, request_id: str) -> None:
        """Records the key of a request that begins. Raises ServiceError DUPLICATE_REQUEST if the tenant has used it."""
        self._expire()
        used = self._live.get((tenant, key)) or self._ended.get((tenant, key))
        if used is not None:
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
            if len(self._ended) > MAX_KEYS:
                self._ended.popitem(last=False)

    def _expire(self) -> None:
        oldest = self._clock() - KEPT_S
        while self._ended:
            key, used = next(iter(self._ended.items()))
            assert used.ended_at is not None
            if used.ended_at > oldest:
                return
            del self._ended[key]
