"""Shares a costly response among many callers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Fetches a response, at most once at a time, and keeps it briefly. For the event loop's thread."""

    def __init__(self, ask: Callable[[], Awaitable[T]], kept_s: float) -> None:
        self._ask = ask
        self._kept_s = kept_s
        self._asking: asyncio.Task[T] | None = None
        self._expires_at = 0.0

    async def get(self) -> T:
        """Returns the response. Raises the exception of the fetch; failures are not kept."""
        asking = self._asking
        if asking is None or (asking.done() and time.monotonic() >= self._expires_at):
            asking = self._asking = asyncio.create_task(self._ask_once(), name="penstock-gateway-recent")
            asking.add_done_callback(_see)
        return await asyncio.shield(asking)

    async def _ask_once(self) -> T:
        self._expires_at = 0.0
        answer = await self._ask()
        self._expires_at = time.monotonic() + self._kept_s
        return answer


def _see(asking: "asyncio.Task[T]") -> None:
    """Marks a failure as seen: the callers that waited for it may be gone."""
    if not asking.cancelled():
        asking.exception()
