"""The events of one response, for clients that follow it later. Independent of HTTP and of stores.

Events resemble each other, so compressed blocks of them take about a twentieth of the memory.
"""

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

_BLOCK_BYTES = 64 << 10
_LEVEL = 1
"""zlib's fastest: about a millisecond for a block, and events still shrink to a twentieth."""
_END = b"\n\n"
"""The end of each event; JSON has no line ends of its own."""


class _Block(NamedTuple):
    """Consecutive events."""

    num_events: int
    data: bytes


class EventLog:
    """Events in the format of ``text/event-stream``, numbered from 0 as their ``sequence_number``."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []
        """The number of the first event of each block."""
        self._tail: list[bytes] = []
        self._num_tail_bytes = 0
        self._num_before_tail = 0

    def __len__(self) -> int:
        return self._num_before_tail + len(self._tail)

    def append(self, event: bytes) -> None:
        """Adds the next event."""
        assert event.endswith(_END)
        self._tail.append(event)
        self._num_tail_bytes += len(event)
        if self._num_tail_bytes >= _BLOCK_BYTES:
            self._compress_tail()

    def read(self, first: int) -> tuple[bytes, int]:
        """Returns consecutive events from number ``first`` on, at most a block of them, and the number of the next one.
        At the end of the log there are none."""
        if first >= self._num_before_tail:
            return b"".join(self._tail[first - self._num_before_tail :]), max(first, len(self))
        at = bisect_right(self._firsts, first) - 1
        events = zlib.decompress(self._blocks[at].data).split(_END)[first - self._firsts[at] :]
        return _END.join(events), self._firsts[at] + self._blocks[at].num_events

    def encoded(self, more: Sequence[bytes] = ()) -> bytes:
        """Returns the whole log, for ``decoded``; as if it also had the events ``more``."""
        tail = [*self._tail, *more]
        return msgspec.msgpack.encode([*self._blocks, _compressed(tail)] if tail else self._blocks)

    @classmethod
    def decoded(cls, data: bytes) -> "EventLog":
        """Returns the log that was encoded."""
        log = cls()
        for block in msgspec.msgpack.decode(data, type=list[_Block]):
            log._add_block(block)
        return log

    def _compress_tail(self) -> None:
        self._add_block(_compressed(self._tail))
        self._tail = []
        self._num_tail_bytes = 0

    def _add_block(self, block: _Block) -> None:
        self._blocks.append(block)
        self._firsts.append(self._num_before_tail)
        self._num_before_tail += block.num_events


def _compressed(events: Sequence[bytes]) -> _Block:
    return _Block(len(events), zlib.compress(b"".join(events), _LEVEL))
