"""Learns how soon requests follow others of their tenant or session, to retain KV for about that long."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

NUM_KEPT = 64
"""How many of the last returns of a tenant or a session count."""
NUM_NEEDED = 8
UNKNOWN_S = 20.0
"""The time for a tenant with fewer returns: twice the 10 s within which 95 % of the turns of agents return, in traces
that were published."""
SHORTEST_S = 2.0
MAX_TENANTS = 4096
MAX_SESSIONS = 16_384

Key = TypeVar("Key")
Session = tuple[str, str]
"""A tenant, and the id of one of its sessions."""


class ReturnTimes:
    """The times between the end of a context and the first request that continues it, by tenant and by session.

    A request continues the context that it names. Without a name, it continues the request of its session that ended
    last.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: OrderedDict[str, deque[float]] = OrderedDict()
        """The least recently active tenant first."""
        self._by_session: OrderedDict[Session, deque[float]] = OrderedDict()
        self._ended: OrderedDict[Session, float] = OrderedDict()
        """When the last request of a session ended, if no other has followed."""

    def add_return(self, tenant: str, seconds: float) -> None:
        """Counts a context that is continued for the first time, this long after its end."""
        _add(self._by_tenant, tenant, seconds, MAX_TENANTS)

    def began(self, tenant: str, session_id: str, *, counts_for_tenant: bool) -> None:
        """Counts a request of a session, as a return if it follows another. ``counts_for_tenant`` is false if
        ``add_return`` counts it."""
        ended = self._ended.pop((tenant, session_id), None)
        if ended is not None:
            seconds = self._clock() - ended
            _add(self._by_session, (tenant, session_id), seconds, MAX_SESSIONS)
            if counts_for_tenant:
                self.add_return(tenant, seconds)

    def ended(self, tenant: str, session_id: str) -> None:
        """Records the end of a request of a session."""
        self._ended[tenant, session_id] = self._clock()
        self._ended.move_to_end((tenant, session_id))
        if len(self._ended) > MAX_SESSIONS:
            self._ended.popitem(last=False)

    def retain_s(self, tenant: str, session_id: str = "") -> float:
        """Returns twice the time within which 95 % of the session's returns were, or of the tenant's if those of the
        session are too few."""
        times = sorted(self._by_session.get((tenant, session_id), ()))
        if len(times) < NUM_NEEDED:
            times = sorted(self._by_tenant.get(tenant, ()))
        if len(times) < NUM_NEEDED:
            return UNKNOWN_S
        return max(SHORTEST_S, 2 * times[int(0.95 * (len(times) - 1))])


def _add(times: OrderedDict[Key, deque[float]], key: Key, seconds: float, most: int) -> None:
    times.setdefault(key, deque(maxlen=NUM_KEPT)).append(seconds)
    times.move_to_end(key)
    if len(times) > most:
        times.popitem(last=False)
