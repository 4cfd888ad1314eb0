"""Sends subscribers of gRPC streams the prefix cache's changes.

A subscriber receives changes as fast as it reads them, within a limit on the event loop's time. Its pending changes
take only their hashes. A subscriber that falls too far behind receives the whole contents again.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.kv.events import KvChanges, KvEventLog, KvEventReader

MAX_MESSAGE_BYTES = 32 << 10
"""Takes a millisecond of the event loop's time."""
PAUSE_S = 0.01
"""The pause after a message, times the number of subscribers. So all subscribers together receive at most 100 messages
per second, which take a tenth of a core if the messages are full."""


class KvWatchers:
    """All subscribers of one kind of stream."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._watching: set[asyncio.Event] = set()
        """The event that each subscriber waits for."""
        self._is_closed = False

    async def follow(self, reader: KvEventReader, send: Callable[[KvChanges], Awaitable[None]]) -> None:
        """Sends what the reader returns, until ``close``. The first message is sent at once, even if it is empty."""
        changed = asyncio.Event()
        self._watching.add(changed)
        try:
            while not self._is_closed:
                await send(reader.read(MAX_MESSAGE_BYTES))
                changed.clear()
                if reader.is_up_to_date and not self._is_closed:
                    self._log.wake_once(changed.set)
                    await changed.wait()
                await asyncio.sleep(len(self._watching) * PAUSE_S)
        finally:
            self._watching.discard(changed)
            self._log.forget_wake(changed.set)

    def close(self) -> None:
        """Ends all subscriptions, because the service shuts down."""
        self._is_closed = True
        for changed in self._watching:
            changed.set()
