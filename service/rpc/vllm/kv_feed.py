"""Numbers the changes of the prefix cache in batches, once for all subscribers, and keeps the last ones.

A subscriber counts each store and each removal of a block, and expects consecutive numbers; so both are sent exactly
once. Numbers begin with the time at which the service started, in microseconds: a number from before a restart is below
all of the current ones. Independent of calls and the engine.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from smg_grpc_proto.generated import common_pb2 as common

from penstock.kv.events import KvEventLog, KvEventReader, StoredBlock
from penstock.service.auth.identity import cache_salt

MAX_BATCH_BYTES = 32 << 10
"""The maximum size of a batch. It takes a millisecond of the event loop's time."""
MAX_HISTORY_BYTES = 4 << 20
"""Subscribers that are further behind must start over."""
_PART_BYTES = 32
"""An upper bound on the size of a block besides its tokens."""
_HASH_BYTES = 8


class KvFeed:
    """The batches so far. Used only on the event loop."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self.sequence = time.time_ns() // 1000
        """The number of the last batch."""
        self._history: deque[bytes] = deque()
        """The last batches, serialized, up to that number."""
        self._history_bytes = 0
        self._resumable_from = self.sequence
        """Subscribers may resume after this number, or a later one. The chunks of a snapshot have lower ones."""
        self._known = set(log.hashes)
        """The blocks that are stored according to the batches."""
        self._reader = KvEventReader(log, log.stream_id, log.sequence)
        self._num_events = 0

    @property
    def is_up_to_date(self) -> bool:
        """Whether all changes are in batches."""
        return self._reader.is_up_to_date

    def can_resume(self, sequence: int) -> bool:
        """Returns whether a subscriber that has all batches up to this number can get the following ones."""
        return self._resumable_from <= sequence and self._has(sequence)

    def after(self, sequence: int) -> list[bytes] | None:
        """Returns the batches that follow a number; None if they are no longer there."""
        if not self._has(sequence):
            return None
        num_new = self.sequence - sequence
        return list(islice(reversed(self._history), num_new))[::-1]

    def _has(self, sequence: int) -> bool:
        return self.sequence - len(self._history) <= sequence <= self.sequence

    def advance(self) -> None:
        """Makes one batch of the next changes, if there are any."""
        events: list[common.KvCacheEvent] = []
        changes = self._reader.read(MAX_BATCH_BYTES)
        if changes.cleared:
            events.append(common.KvCacheEvent(cleared=common.KvCacheCleared()))
            self._known.clear()
        removed = self._known.intersection(changes.removed)
        stored = [block for block in changes.stored if block.block_hash not in self._known]
        self._known -= removed
        self._known.update(block.block_hash for block in stored)
        if removed:
            hashes = [_int64(block_hash) for block_hash in removed]
            events.append(common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=hashes)))
        events += _stored_events(stored, self._log.block_size)
        if not events:
            return
        for event in events:
            self._num_events += 1
            event.event_id = self._num_events
        self.sequence += 1
        raw = _batch(self.sequence, events).SerializeToString()
        self._history.append(raw)
        self._history_bytes += len(raw)
        while self._history_bytes > MAX_HISTORY_BYTES and len(self._history) > 1:
            self._history_bytes -= len(self._history.popleft())

    def snapshot(self) -> Iterator[bytes]:
        """Returns the chunks of the current content, whose changes must all be in batches. The last chunk has the
        number ``sequence``, and later batches follow it."""
        assert self.is_up_to_date, "a snapshot has all changes"
        self._resumable_from = self.sequence
        return self._chunks(*self._log.snapshot(), self.sequence)

    def _chunks(self, num_blocks: int, blocks: Iterator[StoredBlock], sequence: int) -> Iterator[bytes]:
        log = self._log
        num_in_chunk = max(1, MAX_BATCH_BYTES // _block_bytes(log.block_size))
        count = max(1, -(-num_blocks // num_in_chunk))
        for index in range(count):
            events = _stored_events(islice(blocks, num_in_chunk), log.block_size)
            if index == 0:
                events.insert(0, common.KvCacheEvent(cleared=common.KvCacheCleared()))
            batch = _batch(sequence - count + 1 + index, events)
            batch.snapshot.CopyFrom(common.KvSnapshotChunk(index=index, count=count, blocks=num_blocks))
            yield batch.SerializeToString()


def _batch(sequence: int, events: Sequence[common.KvCacheEvent]) -> common.KvEventBatch:
    return common.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=events)


def _stored_events(blocks: Iterable[StoredBlock], block_size: int) -> list[common.KvCacheEvent]:
    """Returns an event for each run of blocks that follow one another."""
    events: list[common.KvCacheEvent] = []
    last: StoredBlock | None = None
    for block in blocks:
        if last is None or not block.parent_hash or block.parent_hash != last.block_hash:
            events.append(common.KvCacheEvent(stored=_run(block)))
        events[-1].stored.blocks.add(
            block_hash=_int64(block.block_hash), token_ids=block.token_ids, block_size=block_size
        )
        last = block
    return events


def _run(first: StoredBlock) -> common.KvBlocksStored:
    """Returns the event of a run without its blocks."""
    return common.KvBlocksStored(
        parent_block_hash=_int64(first.parent_hash) if first.parent_hash else None,
        lora_name=first.adapter or None,
        cache_salt=cache_salt(first.tenant),
    )


def _block_bytes(block_size: int) -> int:
    return _PART_BYTES + 5 * block_size


def _int64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "big", signed=True)
