"""Encodes changes of the prefix cache as vLLM's event batches in MessagePack: a batch is an array, and each event a map
with a tag.

The structs have those fields of vLLM 0.33 for which this service has a value. As in vLLM, absent ones are left out.
"""

from collections.abc import Iterable

import msgspec

from penstock.kv.events import IN_HOST_MEMORY, ON_DEVICE, KvChanges, KvEventLog, StoredBlock
from penstock.service.auth.identity import cache_salt

_MEDIA = {ON_DEVICE: "GPU", IN_HOST_MEMORY: "CPU"}
"""vLLM's names of the tiers. The first is that of the memory in which the model computes, also on a CPU."""


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """One event. Its tag is the name of its class."""


class BlockStored(KvEvent, frozen=True):
    """Consecutive blocks of a sequence that a tier holds from now on."""

    block_hashes: list[int]
    """The last 8 bytes of each hash, as vLLM sends them by default."""
    parent_block_hash: int | None
    token_ids: list[int]
    """The tokens of all blocks, concatenated."""
    block_size: int
    lora_id: int | None
    """Nil: adapters have names, and no numbers."""
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """The other inputs of each block's hash. As in vLLM, the name of the adapter is a key of every block, and the
    ``cache_salt`` one of a sequence's first block."""
    session_id: str | None = None
    cache_salt: str | None = None
    """The same salt for readers that expect it here, such as Dynamo; vLLM's decoder ignores it."""


class BlockRemoved(KvEvent, frozen=True):
    """Blocks that a tier no longer holds."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(KvEvent, frozen=True):
    """No tier holds a block any more."""


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The content of one message."""

    ts: float
    """Unix time, in seconds."""
    events: list[KvEvent]
    data_parallel_rank: int = 0


class BatchEncoder:
    """Encodes the changes that one reader of a log returns. It tracks which tiers were reported to hold each block."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._encoder = msgspec.msgpack.Encoder()
        self._reported: dict[bytes, int] = {}

    def encode_batch(self, changes: KvChanges, unix_time: float) -> bytes | None:
        """Returns the next batch; None if there is nothing new for subscribers."""
        events: list[KvEvent] = []
        if changes.cleared:
            self._reported.clear()
            events.append(AllBlocksCleared())
        gone: dict[int, list[bytes]] = {tier: [] for tier in _MEDIA}
        new: dict[int, list[StoredBlock]] = {tier: [] for tier in _MEDIA}
        for block_hash in changes.removed:
            before = self._reported.pop(block_hash, 0)
            for tier in _MEDIA:
                if before & tier:
                    gone[tier].append(block_hash)
        for block in changes.stored:
            before, now = self._reported.get(block.block_hash, 0), self._log.find_tiers(block.block_hash)
            self._reported[block.block_hash] = now
            for tier in _MEDIA:
                if now & ~before & tier:
                    new[tier].append(block)
                elif before & ~now & tier:
                    gone[tier].append(block.block_hash)
        for tier, hashes in gone.items():
            if hashes:
                events.append(BlockRemoved([_number(block_hash) for block_hash in hashes], _MEDIA[tier]))
        for tier, blocks in new.items():
            events += [self._stored(run, _MEDIA[tier]) for run in self._runs(blocks)]
        return self._encoder.encode(EventBatch(unix_time, events)) if events else None

    def _runs(self, blocks: Iterable[StoredBlock]) -> list[list[StoredBlock]]:
        """Groups blocks that follow each other in one sequence and were computed in one session."""
        runs: list[list[StoredBlock]] = []
        for block in blocks:
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and block.parent_hash == last.block_hash
                and self._log.session_id(block.block_hash) == self._log.session_id(last.block_hash)
            ):
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    def _stored(self, run: list[StoredBlock], medium: str) -> BlockStored:
        first = run[0]
        salt = None if first.parent_hash else cache_salt(first.tenant)
        names: tuple[str, ...] = (first.adapter,) if first.adapter else ()
        extra_keys: list[tuple[str, ...] | None] = [names or None] * len(run)
        if salt is not None:
            extra_keys[0] = (*names, salt)
        return BlockStored(
            block_hashes=[_number(block.block_hash) for block in run],
            parent_block_hash=_number(first.parent_hash) if first.parent_hash else None,
            token_ids=[token_id for block in run for token_id in block.token_ids],
            block_size=self._log.block_size,
            lora_id=None,
            medium=medium,
            lora_name=first.adapter or None,
            extra_keys=extra_keys if any(extra_keys) else None,
            session_id=self._log.session_id(first.block_hash) or None,
            cache_salt=salt,
        )


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")
