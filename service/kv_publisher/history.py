"""The numbered batches that wait to be published or can be replayed. The event loop, which adds them, and the
publisher's thread share them under a lock, which is held only briefly."""

from threading import Lock

MAX_BYTES = 256 << 20
"""Limit on the total size of the batches that are kept."""


class BatchHistory:
    """The last batches, by number."""

    def __init__(self, num_kept: int, max_queued: int, max_bytes: int = MAX_BYTES) -> None:
        """``num_kept``: how many batches can be replayed. ``max_queued``: how many wait to be published."""
        self._num_kept = num_kept
        self._max_queued = max_queued
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._payloads: dict[int, bytes] = {}
        self._first = 0
        """The number of the oldest batch in ``_payloads``."""
        self._next = 0
        """The number of the next batch."""
        self._published = 0
        """All batches before this number were published, or never will be."""
        self._num_bytes = 0
        self.num_dropped = 0
        """Batches that were not published because there were too many."""

    @property
    def num_batches(self) -> int:
        """The number of batches since the start."""
        return self._next

    @property
    def num_published(self) -> int:
        """The number of the first batch that may still be published."""
        return self._published

    def add_batch(self, payload: bytes) -> None:
        """Adds the next batch. Drops the oldest ones for it if there are too many; never waits for a subscriber."""
        with self._lock:
            self._payloads[self._next] = payload
            self._next += 1
            self._num_bytes += len(payload)
            most = max(self._num_kept, self._max_queued)
            while len(self._payloads) > most or (self._num_bytes > self._max_bytes and len(self._payloads) > 1):
                self._drop_first()
            self._skip_to(max(self._first, self._next - self._max_queued))

    def take_unpublished(self) -> tuple[int, bytes] | None:
        """Returns the next batch to publish, with its number; None if there is none."""
        with self._lock:
            if self._published == self._next:
                return None
            number, payload = self._published, self._payloads[self._published]
            self._published += 1
            while len(self._payloads) > self._num_kept and self._first < self._published:
                self._drop_first()
            return number, payload

    def find_from(self, number: int) -> tuple[int, bytes] | None:
        """Returns the first batch with at least this number that was published or dropped, and is still kept; None if
        there is none."""
        with self._lock:
            number = max(number, self._first)
            return (number, self._payloads[number]) if number < self._published else None

    def _drop_first(self) -> None:
        self._num_bytes -= len(self._payloads.pop(self._first))
        self._first += 1

    def _skip_to(self, number: int) -> None:
        if number > self._published:
            self.num_dropped += number - self._published
            self._published = number
