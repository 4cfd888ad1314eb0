"""What all streams share: how often each may write, and how much they may keep for readers that are slow. Knows no
stream."""

WRITE_COST_S = 2.1e-4
"""Each stream's share of the time between messages. At 40 us a message, most of it the kernel's and gRPC's, writers
take 19 % of a core at most, however many streams there are."""

MAX_STREAM_BYTES = 4 << 20
MAX_TOTAL_BYTES = 32 << 20
MIN_STREAM_BYTES = 64 << 10
"""One message. However many readers are slow, a stream that is read is not stopped for what a step brings."""


class BufferBudget:
    """What waits on all streams. Each may have as much as is still free, so the fullest streams are stopped first, and
    the more of them there are the less each may have: n of them keep the n-th part of n/(n+1) of the whole."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Kept up by the streams."""

    def threshold(self) -> int:
        """What one stream may have now."""
        return min(MAX_STREAM_BYTES, max(MIN_STREAM_BYTES, MAX_TOTAL_BYTES - self.num_bytes))


class WritePacer:
    """How long a stream waits between two messages: in proportion to the streams that have live requests."""

    def __init__(self, write_cost_s: float = WRITE_COST_S) -> None:
        self.interval = 0.0
        """Seconds. With few streams it is less than any step."""
        self._num_active = 0
        self._write_cost_s = write_cost_s

    def add_streams(self, num_streams: int) -> None:
        """So many more streams (or fewer) have live requests."""
        self._num_active += num_streams
        self.interval = self._num_active * self._write_cost_s
