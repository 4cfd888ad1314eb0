"""Shares a costly response among many callers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Fetches a response, at most once at a time, and keeps it briefly. For the event loop's thread."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], kept_s: float) -> None:
        self._fetch = fetch
        self._kept_s = kept_s
        self._fetching: asyncio.Task[T] | None = None
        self._expires_at = 0.0

    async def get(self) -> T:
        """Returns the response. Raises the exception of the fetch; failures are not kept."""
        fetching = self._fetching
        if fetching is None or (fetching.done() and time.monotonic() >= self._expires_at):
            fetching = self._fetching = asyncio.create_task(self._fetch_once(), name="penstock-gateway-recent")
            fetching.add_done_callback(_see)
        return await asyncio.shield(fetching)

    def expire(self) -> None:
        """Makes the next call of ``get`` fetch again."""
        self._expires_at = 0.0

    async def _fetch_once(self) -> T:
        try:
            answer = await self._fetch()
        except BaseException:
            self._fetching = None  # a failed task refers to this object: a reference cycle
            raise
        self._expires_at = time.monotonic() + self._kept_s
        return answer


def _see(fetching: "asyncio.Task[T]") -> None:
    """Marks a failure as seen: the callers that waited for it may be gone."""
    if not fetching.cancelled():
        fetching.exception()
