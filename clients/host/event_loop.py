"""The event loop of programs that handle many messages."""

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

COLLECT_AFTER_BYTES = 64 << 20
"""Growth of the process after which the collector runs. The collector itself counts objects, and a few of them may hold
hundreds of megabytes."""
CHECK_INTERVAL_S = 1.0
TRIM_INTERVAL_S = 10.0
"""Giving 600 MB back takes 70 ms, in which nothing can be allocated."""
_MEMORY = Path("/proc/self/statm")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory if it is installed, at half the cost per message; otherwise None, for asyncio's loop."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def calm_collector() -> None:
    """Makes Python's cycle collector run less often and scan less.

    A step of 256 streams makes thousands of short-lived objects without cycles; by default the collector uses an eighth
    of the loop's time to scan them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)


class MemoryWatch:
    """Runs the cycle collector when the process has grown by ``COLLECT_AFTER_BYTES`` since the last time, in addition
    to the collector's own counts of objects, then returns free memory to the system. Does nothing where the size of
    the process is unknown."""

    def __init__(self) -> None:
        self._trimmed_at = -TRIM_INTERVAL_S
        self._wants_trim = False
        self._least_bytes = 0
        """The smallest size since the last collection."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Checks once per second, until ``stop``."""
        with suppress(OSError):
            self._least_bytes = process_bytes()
            self._timer = loop.call_later(CHECK_INTERVAL_S, self._check_again, loop)

    def stop(self) -> None:
        """Stops checking. Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self) -> None:
        num_bytes = process_bytes()
        if num_bytes - self._least_bytes >= COLLECT_AFTER_BYTES:
            gc.collect()
            self._least_bytes = process_bytes()
            self._wants_trim = True
        else:
            self._least_bytes = min(self._least_bytes, num_bytes)
        if self._wants_trim and time.monotonic() >= self._trimmed_at + TRIM_INTERVAL_S:
            self._wants_trim, self._trimmed_at = False, time.monotonic()
            threading.Thread(target=_trim_heap, name="trim", daemon=True).start()

    def _check_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(CHECK_INTERVAL_S, self._check_again, loop)
        with suppress(OSError):
            self.check()


def _trim_heap() -> None:
    """Makes glibc return free memory to the system. By itself it returns only the end of the heap."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def process_bytes() -> int:
    """Returns the resident size of this process. Raises OSError if the system does not report it."""
    return int(_MEMORY.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
