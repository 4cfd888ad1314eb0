"""The memory of KV pages on CPUs, and when it is taken from the system: where a virtual machine's memory is its host's
too, the first write to it can cost more than what is computed meanwhile. Imports no tensor library."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kernels.cpu.bindings import LANES
from penstock.kernels.cpu.program import Library, Memory
from penstock.models.errors import ModelError

FIRST_TOKENS, FIRST_BYTES = 1 << 15, 4 << 30
"""Of KV at most, whose memory is taken before they are there."""
QUIET_S = 0.1
"""Without a step, until it is taken."""
SLICE_BYTES = 2 << 20
"""At a time: a huge page. A step that begins meanwhile may wait for so much."""


def allocate_pages(library: Library, num_blocks: int, num_bytes: int) -> Memory:
    """Of so many blocks of so many bytes. Raises ModelError."""
    try:
        return library.memory(num_blocks * num_bytes)
    except MemoryError as error:
        raise ModelError(
            f"the KV cache of {num_blocks} blocks cannot be allocated on cpu: lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes or --max-model-len"
        ) from error


class FirstPages:
    """Those that will be written first. The others are taken as they are written, so that an idle service does not hold
    memory for nothing."""

    def __init__(self, pages: Memory, page_bytes: int) -> None:
        """``page_bytes``: of a page of 16 tokens, in all layers."""
        self._pages = pages
        self.num_bytes = min(page_bytes * (FIRST_TOKENS // LANES), FIRST_BYTES, pages.num_bytes)
        """What is taken ahead."""
        self._quiet_since: float | None = 0.0
        """None: a step is computed."""

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """While a step is computed."""
        self._quiet_since = None
        yield
        self._quiet_since = time.monotonic()

    def start_prefault(self) -> None:
        """Begins to, on a thread of its own, while there are no steps. Not beside them, however low the priority: each
        page that the system cleared meanwhile was seen to keep a step waiting."""
        threading.Thread(target=self._take_all, name="pages", daemon=True).start()

    def _take_all(self) -> None:
        for begin in range(0, self.num_bytes, SLICE_BYTES):
            while (since := self._quiet_since) is None or time.monotonic() - since < QUIET_S:
                time.sleep(QUIET_S)
            self._pages.populate(begin, min(SLICE_BYTES, self.num_bytes - begin))
