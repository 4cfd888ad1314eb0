"""Learns how soon each tenant's requests continue others, to retain KV for about as long and no longer."""

from collections import OrderedDict, deque

NUM_KEPT = 64
"""The number of last returns of a tenant that count."""
NUM_NEEDED = 8
UNKNOWN_S = 20.0
"""The time for a tenant with fewer returns: twice the 10 s within which 95 % of the turns of agents return, in traces
that were published."""
SHORTEST_S = 2.0
MAX_TENANTS = 4096


class ReturnTimes:
    """The times between the end of a context and the first request that continues it, by tenant."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[float]] = OrderedDict()
        """The least recently active tenant first."""

    def add_return(self, tenant: str, seconds: float) -> None:
        """Counts a context that is continued for the first time, this long after its end."""
        self._by_tenant.setdefault(tenant, deque(maxlen=NUM_KEPT)).append(seconds)
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)

    def retain_s(self, tenant: str) -> float:
        """Returns twice the time within which 95 % of the tenant's returns were."""
        times = sorted(self._by_tenant.get(tenant, ()))
        if len(times) < NUM_NEEDED:
            return UNKNOWN_S
        return max(SHORTEST_S, 2 * times[int(0.95 * (len(times) - 1))])
