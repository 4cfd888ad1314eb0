"""Numbers the changes of the prefix cache in batches, once for all subscribers, and keeps the last ones.

A subscriber counts each store and each removal of a block, and expects consecutive numbers; so both are sent exactly
once. Numbers begin with the time at which the service started, in microseconds: a number from before a restart is below
all of the current ones. Independent of calls and the engine.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from smg_grpc_proto.generated import common_pb2 as common

from penstock.kv.events import KvEventLog, StoredBlock
from penstock.service.auth.identity import DEFAULT_TENANT

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
        self._taken = log.sequence
        """Changes of the log up to here are in batches or pending."""
        self._pending: deque[bytes] = deque()
        self._num_events = 0

    @property
    def is_up_to_date(self) -> bool:
        """Whether all changes are in batches."""
        return not self._pending and self._taken == self._log.sequence

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
        if not self._pending:
            if not self._log.knows_since(self._taken):
                events.append(common.KvCacheEvent(cleared=common.KvCacheCleared()))
                self._known.clear()
                self._pending.extend(self._log.hashes)
            else:
                self._pending.extend(dict.fromkeys(self._log.changed_since(self._taken)))
            self._taken = self._log.sequence
        removed, stored = self._next_changes()
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

    def _next_changes(self) -> tuple[list[bytes], list[StoredBlock]]:
        removed: list[bytes] = []
        stored: list[StoredBlock] = []
        num_bytes = 0
        while self._pending and num_bytes < MAX_BATCH_BYTES:
            block_hash = self._pending.popleft()
            block = self._log.find(block_hash)
            if block is None and block_hash in self._known:
                self._known.remove(block_hash)
                removed.append(block_hash)
                num_bytes += _HASH_BYTES
            elif block is not None and block_hash not in self._known:
                self._known.add(block_hash)
                stored.append(block)
                num_bytes += _block_bytes(self._log.block_size)
        return removed, stored

    def snapshot(self) -> Iterator[bytes]:
        """Returns the chunks of the current content, whose changes must all be in batches. The last chunk has the
        number ``sequence``, and later batches follow it."""
        assert self.is_up_to_date, "a snapshot has all changes"
        self._resumable_from = self.sequence
        return self._chunks(self._log.snapshot(), self.sequence)

    def _chunks(self, blocks: Sequence[tuple[bytes, bytes]], sequence: int) -> Iterator[bytes]:
        log = self._log
        num_in_chunk = max(1, MAX_BATCH_BYTES // _block_bytes(log.block_size))
        count = max(1, -(-len(blocks) // num_in_chunk))
        for index in range(count):
            some = blocks[index * num_in_chunk : (index + 1) * num_in_chunk]
            events = _stored_events([log.unpacked(*block) for block in some], log.block_size)
            if index == 0:
                events.insert(0, common.KvCacheEvent(cleared=common.KvCacheCleared()))
            batch = _batch(sequence - count + 1 + index, events)
            batch.snapshot.CopyFrom(common.KvSnapshotChunk(index=index, count=count, blocks=len(blocks)))
            yield batch.SerializeToString()


def _batch(sequence: int, events: Sequence[common.KvCacheEvent]) -> common.KvEventBatch:
    return common.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=events)


def _stored_events(blocks: Sequence[StoredBlock], block_size: int) -> list[common.KvCacheEvent]:
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
    """Returns the event of a run without its blocks. Consumers hash tokens themselves, so the tenant is the salt that
    keeps the same tokens of two tenants separate; callers without credentials have none."""
    return common.KvBlocksStored(
        parent_block_hash=_int64(first.parent_hash) if first.parent_hash else None,
        cache_salt=first.tenant if first.tenant not in ("", DEFAULT_TENANT) else None,
    )


def _block_bytes(block_size: int) -> int:
    return _PART_BYTES + 5 * block_size


def _int64(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "big", signed=True)
