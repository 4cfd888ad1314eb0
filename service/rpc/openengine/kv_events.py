"""SubscribeKvEvents: the prefix cache's contents, if requested, and its changes.

The number of a batch is that of its last change, so numbers rise by more than 1, and every part of a snapshot but the
last has that of the batch before. Numbers begin with the time at which the service started, in microseconds: those from
before a restart are below all of the current ones.
"""

import time
from collections.abc import Iterable
from typing import Any

import grpc
from openengine.v1 import error_pb2, kv_pb2 as oe

from penstock.kv.events import KvChanges, KvEventLog, KvEventReader, StoredBlock
from penstock.service.auth.identity import cache_salt
from penstock.service.errors import invalid
from penstock.service.kv_publisher.watchers import KvWatchers
from penstock.service.rpc.foreign.contracts import protocol_error
from penstock.service.transport.call_end import write

_HASH_ENCODING = "bytes"


class KvSubscriptions:
    """Serves all subscribers."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._watchers = KvWatchers(log)
        self._base = time.time_ns() // 1000
        """The number of a batch, less the number of its last change in the log."""

    async def subscribe(
        self, request: oe.SubscribeKvEventsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Sends batches until the caller disconnects or the service shuts down. Raises StatusError if the first
        number is unknown, unless the caller accepts a snapshot."""
        check_ranks(request.data_parallel_ranks)
        reader = self._reader(request)
        # A router assumes that a worker has no events if nothing arrives at once.
        await context.send_initial_metadata(())
        last = self._base

        async def send(changes: KvChanges) -> None:
            nonlocal last
            if changes.sequence:
                last = self._base + changes.sequence
            events = [*_events(changes, self._log.block_size)]
            if events:
                batch = oe.KvEventBatch(sequence_number=last, timestamp_unix_nanos=time.time_ns(), events=events)
                await write(context, oe.SubscribeKvEventsResponse(batch=batch))

        await self._watchers.follow(reader, send)
        error = error_pb2.EngineError(
            code=error_pb2.ERROR_CODE_INTERNAL, message="the service is shutting down", retryable=True
        )
        await write(context, oe.SubscribeKvEventsResponse(error=error))

    def close(self) -> None:
        self._watchers.close()

    def _reader(self, request: oe.SubscribeKvEventsRequest) -> KvEventReader:
        log, start = self._log, request.start_sequence_number
        if not start:
            return KvEventReader(log, log.stream_id, 0 if request.include_snapshot else log.sequence)
        reported = start - 1 - self._base
        if log.knows_since(reported):
            return KvEventReader(log, log.stream_id, reported)
        if request.include_snapshot:
            return KvEventReader(log)
        raise protocol_error(
            grpc.StatusCode.OUT_OF_RANGE,
            f"start_sequence_number: this service does not have every change since {start}; set include_snapshot, or "
            "subscribe from 0",
        )


def check_ranks(ranks: Iterable[int]) -> None:
    """Raises ServiceError for any rank but 0."""
    for rank in ranks:
        if rank:
            raise invalid("data_parallel_ranks", f"may only have 0, the only rank; it has {rank}")


def _events(changes: KvChanges, block_size: int) -> Iterable[oe.KvEvent]:
    if changes.cleared:
        yield oe.KvEvent(all_blocks_cleared=oe.AllBlocksCleared())
    if changes.removed:
        hashes = [_hash(block_hash) for block_hash in changes.removed]
        yield oe.KvEvent(block_removed=oe.BlockRemoved(block_hashes=hashes, medium=oe.STORAGE_MEDIUM_GPU))
    last = b""
    event: oe.KvEvent | None = None
    for block in changes.stored:
        if event is None or block.parent_hash != last or not last:
            if event is not None:
                yield event
            event = oe.KvEvent(block_stored=_run(block, block_size))
        stored = event.block_stored
        stored.block_hashes.append(_hash(block.block_hash))
        stored.token_ids.extend(block.token_ids)
        if stored.extra_keys and len(stored.block_hashes) > 1:
            stored.extra_keys.add(values=_adapter_keys(block))
        last = block.block_hash
    if event is not None:
        yield event


def _run(first: StoredBlock, block_size: int) -> oe.BlockStored:
    """Returns the event of consecutive blocks without its blocks. The medium is that in which the model computes, also
    on a CPU. As in vLLM, the name of the adapter is an extra key of each block, and a tenant's name one of a sequence's
    first block; callers without credentials have none."""
    run = oe.BlockStored(block_size=block_size, medium=oe.STORAGE_MEDIUM_GPU, lora_name=first.adapter)
    keys = _adapter_keys(first)
    if first.parent_hash:
        run.parent_block_hash.CopyFrom(_hash(first.parent_hash))
    elif (salt := cache_salt(first.tenant)) is not None:
        keys.append(salt)
    if keys:
        run.extra_keys.add(values=keys)
    return run


def _adapter_keys(block: StoredBlock) -> list[str]:
    return [block.adapter] if block.adapter else []


def _hash(block_hash: bytes) -> oe.KvBlockHash:
    return oe.KvBlockHash(value=block_hash, encoding=_HASH_ENCODING)
