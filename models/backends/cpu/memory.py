"""The memory of KV pages on CPUs, and when it is allocated: on a virtual machine whose host allocates memory at first
use too, the first write to a page can cost more than the computation meanwhile. Imports no tensor library."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kernels.cpu.bindings import LANES
from penstock.kernels.cpu.program import Memory

FIRST_TOKENS, FIRST_BYTES = 1 << 15, 4 << 30
"""The limits of KV whose memory is allocated before the tokens arrive."""
QUIET_S = 0.1
"""The time without a step after which memory is allocated."""
SLICE_BYTES = 2 << 20
"""Allocated at a time: a huge page. A step that starts meanwhile may wait for one slice."""


class FirstPages:
    """The pages that will be written first. The others are allocated when they are written, so that an idle service
    does not hold memory for nothing."""

    def __init__(self, pages: Memory, page_bytes: int) -> None:
        """``page_bytes`` is the size of a page of 16 tokens in all layers."""
        self._pages = pages
        self.num_bytes = min(page_bytes * (FIRST_TOKENS // LANES), FIRST_BYTES, pages.num_bytes)
        self._quiet_since: float | None = 0.0
        """None while a step is computed."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the allocation while a step is computed."""
        self._quiet_since = None
        yield
        self._quiet_since = time.monotonic()

    def start_prefault(self) -> None:
        """Starts the allocation on its own thread. It runs only while there are no steps, even at low priority: each
        page that the system cleared during a step was seen to delay the step."""
        threading.Thread(target=self._take_all, name="pages", daemon=True).start()

    def _take_all(self) -> None:
        for begin in range(0, self.num_bytes, SLICE_BYTES):
            while (since := self._quiet_since) is None or time.monotonic() - since < QUIET_S:
                time.sleep(QUIET_S)
            self._pages.populate(begin, min(SLICE_BYTES, self.num_bytes - begin))
