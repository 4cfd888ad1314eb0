"""Turns on the event loop for parsing large bodies and messages, of any format.

Parsing and validating hold the interpreter's lock, so a thread would not help: streams would wait anyway.
Instead it is done in small portions, one at a time, with a pause after each portion.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

PORTION_S = 0.002
"""Divisible work pauses after this time."""
_REST = 1.0
_LONG_S, _LONG_REST = 0.005, 6.0
"""The pause after a portion, as a multiple of the time that it took. A portion above ``_LONG_S``, which cannot be
divided, delays every stream, so the pause after it is longer: few tokens in a hundred may be late."""
_MAX_REST_S = 1.0


class ParseTurns:
    """Gives one body at a time its turn. Tenants take turns, so one that sends many bodies waits only for itself."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting bodies by tenant; the first tenant is next."""
        self._is_taken = False
        self._free_at = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of bodies that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator["ParseTurns"]:
        """Waits for the turn of one of a tenant's bodies, and holds the turn."""
        await self._wait(tenant)
        try:
            await self.pause()  # the last one's portion may have been a long one
            yield self
        finally:
            self._pass_on()

    @contextmanager
    def portion(self) -> Iterator[None]:
        """Measures a portion of work. The next ``pause`` is in proportion to its time."""
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            rest = _LONG_REST if ended - began > _LONG_S else _REST
            self._free_at = max(self._free_at, ended + min(_MAX_REST_S, rest * (ended - began)))

    async def pause(self) -> None:
        """Lets other tasks run, for the time that the last portion requires, and at least for one turn of the loop."""
        await asyncio.sleep(max(0.0, self._free_at - self._clock()))

    async def _wait(self, tenant: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn had just been granted
            else:
                self._withdraw(tenant, turn)
            raise

    def _withdraw(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
