"""Limits that all streams share: how often each may write, and how much they buffer for slow readers. Knows nothing
about single streams."""

WRITE_COST_S = 2.1e-4
"""The time between a stream's messages, per active stream. At 40 us per message, most of it in the kernel and gRPC,
writers take at most 19 % of a core for any number of streams."""

REQUEST_BYTES = 256 << 10
"""What one live request adds to its stream's limit. A stream that is not read stops before it has computed much."""
MAX_STREAM_BYTES = 4 << 20
MAX_TOTAL_BYTES = 32 << 20
MIN_STREAM_BYTES = 64 << 10
"""The size of one message. Slow readers on other streams never stop a stream that is read because of one step's
output."""


class BufferBudget:
    """The pending output of all streams. A stream may have as much as is still free, so the fullest streams are stopped
    first, and the more of them there are, the less each may have: n full streams have 1/(n+1) of the whole each."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """The pending bytes; updated by the streams."""

    def threshold(self, num_live: int) -> int:
        """Returns the number of bytes that a stream with ``num_live`` requests may have now."""
        most = min(MAX_STREAM_BYTES, REQUEST_BYTES * max(1, num_live))
        return min(most, max(MIN_STREAM_BYTES, MAX_TOTAL_BYTES - self.num_bytes))


class WritePacer:
    """The interval between a stream's messages, in proportion to the number of streams with live requests."""

    def __init__(self, write_cost_s: float = WRITE_COST_S) -> None:
        self.interval = 0.0
        """Seconds. With few streams it is shorter than any step."""
        self._num_active = 0
        self._write_cost_s = write_cost_s

    def add_streams(self, num_streams: int) -> None:
        """Adds ``num_streams`` (or subtracts, if negative) to the number of streams with live requests."""
        self._num_active += num_streams
        self.interval = self._num_active * self._write_cost_s
