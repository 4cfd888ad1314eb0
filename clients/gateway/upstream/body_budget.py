"""Limits the memory of request bodies: a budget for all of them and one for each tenant. Independent of HTTP."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVICTION_INTERVAL_S = 0.25
"""Time between two evictions of a tenant's bodies. Meanwhile, bodies that lack room are not read. Without this, the
sender of an evicted body would send the next one as fast as the network allows."""
TENANT_SHARE = 0.5
"""The part of the budget that one tenant may take."""
TENANT_BYTES_PER_S, BURST_BYTES = 32 << 20, 4 << 20
"""How fast a tenant's bodies are received, after a burst. Receiving them takes the event loop from all streams."""


class NoRoomForBody(Exception):
    """The budget is used up, and no slower body can be evicted."""

    def __init__(self, *, is_tenants: bool) -> None:
        """``is_tenants``: whether the tenant has used up its own part."""
        super().__init__()
        self.is_tenants = is_tenants


class BodyInMemory:
    """A body, complete or still arriving."""

    def __init__(self, budget: "BodyBudget", tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.num_bytes = 0
        self.evict: Callable[[], None] | None = None
        """Stops waiting for the rest of the body; None for a complete body."""

    async def add_bytes(self, num_bytes: int) -> None:
        """Counts bytes that arrived. If there is no room, evicts slower bodies or waits. Raises NoRoomForBody."""
        await self._budget.take_bytes(self, num_bytes)

    def shrink_to(self, num_bytes: int) -> None:
        """Counts only ``num_bytes`` of a whole body from now on. Does nothing if fewer are counted already."""
        self._budget.give_back(self, self.num_bytes - num_bytes)


class BodyBudget:
    """Counts the bytes of all bodies in memory.

    When they exceed the budget, the body that has been arriving for the longest time is evicted: one of the same tenant
    if that has exceeded its part, else one of the tenant that holds the most. Until the next eviction is due, bodies
    that lack room wait.
    """

    def __init__(
        self, max_bytes: int, interval_s: float = EVICTION_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self.max_tenant_bytes = int(max_bytes * TENANT_SHARE)
        self._bodies: dict[BodyInMemory, None] = {}
        """All bodies, the oldest first."""
        self._bytes_of: Counter[str] = Counter()
        self._interval_s = interval_s
        self._next_eviction: dict[str, float] = {}
        """The time of each tenant's next eviction, for tenants that have bodies."""
        self._received: dict[str, float] = {}
        """The time at which a tenant's bodies have been received at the rate that it may have, for tenants that have
        bodies."""
        self._room_of: dict[str | None, asyncio.Future[None]] = {}
        """Completed when there may be room again: by tenant, and under None for the whole budget."""

    @property
    def num_bytes(self) -> int:
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

    async def take_bytes(self, body: BodyInMemory, num_bytes: int) -> None:
        """Counts bytes of a body. Raises NoRoomForBody."""
        if body not in self._bodies:
            return  # it was evicted, and its request ends
        body.num_bytes += num_bytes
        self._bytes_of[body.tenant] += num_bytes
        await self._pace(body.tenant, num_bytes)
        while body in self._bodies and (tenant := self._tenant_that_yields(body)) is not None:
            if (wait_s := self._next_eviction.get(tenant, 0.0) - self._clock()) > 0:
                await self._wait(body.tenant if self._is_over(body.tenant) else None, wait_s)
                continue
            self._next_eviction[tenant] = self._clock() + self._interval_s
            arriving = (each for each in self._bodies if each.tenant == tenant and each.evict is not None)
            if (slowest := next(arriving, body)) is body:
                raise NoRoomForBody(is_tenants=self._is_over(body.tenant))
            evict, slowest.evict = slowest.evict, None
            assert evict is not None, "complete bodies were skipped"
            self._drop(slowest)
            evict()

    async def _pace(self, tenant: str, num_bytes: int) -> None:
        """Waits until a tenant may receive more."""
        now = self._clock()
        began = max(self._received.get(tenant, 0.0), now - BURST_BYTES / TENANT_BYTES_PER_S)
        received = self._received[tenant] = began + num_bytes / TENANT_BYTES_PER_S
        if received > now:
            await asyncio.sleep(received - now)

    def give_back(self, body: BodyInMemory, num_bytes: int) -> None:
        if body in self._bodies and num_bytes > 0:
            body.num_bytes -= num_bytes
            self._bytes_of[body.tenant] -= num_bytes
            self._wake(body.tenant)

    async def _wait(self, tenant: str | None, seconds: float) -> None:
        """Waits until there may be room, for at most ``seconds``."""
        room = self._room_of.setdefault(tenant, asyncio.get_running_loop().create_future())
        await asyncio.wait([room], timeout=seconds)

    def _wake(self, tenant: str) -> None:
        for whose in (tenant, None):
            if (room := self._room_of.pop(whose, None)) is not None:
                room.set_result(None)

    def _is_over(self, tenant: str) -> bool:
        return self._bytes_of[tenant] > self.max_tenant_bytes

    def _tenant_that_yields(self, body: BodyInMemory) -> str | None:
        """Returns the tenant that loses a body; None if there is room."""
        if self._is_over(body.tenant):
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
                self._next_eviction.pop(body.tenant, None)
                self._received.pop(body.tenant, None)
            self._wake(body.tenant)
