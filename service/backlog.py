"""How much all streams together may keep for readers that are slow. Knows no stream."""

MAX_STREAM_BYTES = 4 << 20
MAX_TOTAL_BYTES = 32 << 20
"""As messages they take up to twice as much memory as on the wire."""
MIN_STREAM_BYTES = 64 << 10
"""One message. However many readers are slow, a stream that is read is not stopped for what a step brings."""


class Backlog:
    """What waits on all streams. Each may have as much as is still free, so the fullest streams are stopped first, and
    the more of them there are the less each may have: n of them keep the n-th part of n/(n+1) of the whole."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So much more waits, or less."""
        self.num_bytes += num_bytes

    def threshold(self) -> int:
        """What one stream may have now."""
        return min(MAX_STREAM_BYTES, max(MIN_STREAM_BYTES, MAX_TOTAL_BYTES - self.num_bytes))
