"""Limits the memory of request bodies: a budget for all of them and one for each tenant. Knows no HTTP."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TENANT_SHARE = 0.5
"""The part of the budget that one tenant may take."""


class NoRoomForBody(Exception):
    """The budget is used up, and no other body that could give way is slower than this one."""

    def __init__(self, *, is_tenants: bool) -> None:
        """``is_tenants``: whether the tenant has used up its own part."""
        super().__init__()
        self.is_tenants = is_tenants


class BodyInMemory:
    """A body, whole or still arriving."""

    def __init__(self, budget: "BodyBudget", tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.num_bytes = 0
        self.evict: Callable[[], None] | None = None
        """Gives up waiting for the rest of the body; None for a body that is whole."""

    def add(self, num_bytes: int) -> None:
        """Counts bytes that arrived. Evicts slower bodies if there is no room for them. Raises NoRoomForBody."""
        self._budget.take(self, num_bytes)

    def shrink_to(self, num_bytes: int) -> None:
        """Counts only ``num_bytes`` of a whole body from now on. Does nothing if fewer are counted already."""
        self._budget.give_back(self, self.num_bytes - num_bytes)


class BodyBudget:
    """Counts the bytes of all bodies in memory.

    When they exceed the budget, the body that has been arriving for the longest time is evicted: one of the same tenant
    if that has exceeded its part, else one of the tenant that holds the most.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_tenant_bytes = int(max_bytes * TENANT_SHARE)
        self._bodies: dict[BodyInMemory, None] = {}
        """Oldest first."""
        self._bytes_of: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return self._bytes_of.total()

    @contextmanager
    def body(self, tenant: str) -> Iterator[BodyInMemory]:
        """Holds a body until the end of the block."""
        body = BodyInMemory(self, tenant)
        self._bodies[body] = None
        try:
            yield body
        finally:
            self._drop(body)

    def take(self, body: BodyInMemory, num_bytes: int) -> None:
        """Counts bytes of a body. Raises NoRoomForBody."""
        if body not in self._bodies:
            return  # it was evicted, and what waits for it ends
        body.num_bytes += num_bytes
        self._bytes_of[body.tenant] += num_bytes
        while (tenant := self._tenant_that_yields(body)) is not None:
            slowest = next((each for each in self._bodies if each.tenant == tenant and each.evict is not None), None)
            if slowest is None or slowest is body:
                raise NoRoomForBody(is_tenants=self._bytes_of[body.tenant] > self.max_tenant_bytes)
            evict, slowest.evict = slowest.evict, None
            assert evict is not None, "bodies that are whole were skipped"
            self._drop(slowest)
            evict()

    def give_back(self, body: BodyInMemory, num_bytes: int) -> None:
        """Counts these bytes of a body no more."""
        if body in self._bodies and num_bytes > 0:
            body.num_bytes -= num_bytes
            self._bytes_of[body.tenant] -= num_bytes

    def _tenant_that_yields(self, body: BodyInMemory) -> str | None:
        """Returns the tenant whose bodies give way; None if there is room."""
        if self._bytes_of[body.tenant] > self.max_tenant_bytes:
            return body.tenant
        if self.num_bytes <= self.max_bytes:
            return None
        return max({each.tenant for each in self._bodies if each.evict is not None}, key=self._bytes_of.__getitem__)

    def _drop(self, body: BodyInMemory) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._bytes_of[body.tenant] -= body.num_bytes
            if not self._bytes_of[body.tenant]:
                del self._bytes_of[body.tenant]
