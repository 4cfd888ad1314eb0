"""Threads that work beside the event loop, and how much may wait for them. Knows nothing of the work."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.service.errors import Reason, ServiceError

_BYTES_PER_JOB = 1024
"""What waiting costs besides the input."""

T = TypeVar("T")


class Lane:
    """A few threads with one queue, which refuses more than it can hold. ``run`` is for the event loop."""

    def __init__(self, name: str, num_threads: int, max_waiting_bytes: int) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting_bytes = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], num_bytes: int) -> T:
        """Runs ``work`` in a thread; ``num_bytes`` is how much input it holds while it waits.

        Raises what ``work`` raises, and ServiceError PREPARATION_FULL. Work that has begun goes on when its caller is
        cancelled.
        """
        num_bytes += _BYTES_PER_JOB
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise ServiceError(Reason.PREPARATION_FULL)
        self._waiting_bytes += num_bytes
        done = self._threads.submit(_without_panic, work)
        done.add_done_callback(functools.partial(self._release, asyncio.get_running_loop(), num_bytes))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Ends the threads; work that has not begun is cancelled, and nothing is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, loop: asyncio.AbstractEventLoop, num_bytes: int, done: object) -> None:
        # Called by the thread that did the work; the count belongs to the loop, which may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._waiting_bytes -= num_bytes


def _without_panic(work: Callable[[], T]) -> T:
    """A panic of the tokenizer's library is no Exception; here it becomes one, so that it fails one request as any
    error does."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as panic:
        raise RuntimeError(f"the tokenizer's library panicked: {panic}") from panic
