"""Provides a mirror of the prefix map with which blocks can be found, and with the changes since its last update.

Only the hash of a change is kept. A reader looks up whether that hash can be found now, so reporting a change twice
does no harm, and changes that cancel out cost nothing. This module knows hashes and tokens, neither blocks nor
subscribers.
"""

import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

_PART_BYTES = 8
"""Tags and lengths of one part of a message."""
ON_DEVICE, IN_HOST_MEMORY = 1, 2
"""Bits of the tiers that hold a block."""


class BlockOrigin(NamedTuple):
    """The request whose step computed a block."""

    tenant: str = ""
    session_id: str = ""
    adapter: str = ""
    """The name of the LoRA adapter; empty: none."""


NO_ORIGIN = BlockOrigin()


class StoredBlock(NamedTuple):
    """A block that can be found."""

    block_hash: bytes
    parent_hash: bytes
    """Empty for the first block of a sequence."""
    token_ids: tuple[int, ...]
    tenant: str = ""
    """The tenant whose requests can find it; empty if it was stored without one."""
    adapter: str = ""
    """The name of the LoRA adapter whose requests can find it; empty: those without one."""


class KvChanges(NamedTuple):
    """Changes for a mirror, which applies them in this order: ``cleared``, ``removed``, ``stored``."""

    sequence: int
    """After these changes the mirror has every change up to this one, and can resume from it. 0 until the whole content
    has been sent."""
    cleared: bool
    removed: list[bytes]
    stored: list[StoredBlock]


class KvEventLog:
    """Every block that can be found, and the last changes, numbered."""

    def __init__(
        self, block_size: int, max_changes: int, find_tiers: Callable[[bytes], int] = lambda _: ON_DEVICE
    ) -> None:
        """A reader that falls more than ``max_changes`` behind starts over with the whole content. ``find_tiers``
        returns the bits of the tiers that hold a block now."""
        self.block_size = block_size
        self.find_tiers = find_tiers
        self.keeps_details = False
        """Whether a move between tiers counts as a change, and whether sessions are kept."""
        self.stream_id = secrets.token_hex(8)
        """Identifies this log; sequence numbers are valid only within it."""
        self.sequence = 1
        """The number of the last change. The empty cache is the first one."""
        # Hashes of the last changes, up to ``sequence``.
        self._recent: deque[bytes] = deque(maxlen=max_changes)
        self._pack = struct.Struct(f"<{block_size}I")
        # Hash -> the length of the parent's hash, that hash, the token ids, the tenant and the adapter: 140 bytes for
        # 16 tokens.
        self._contents: dict[bytes, bytes] = {}
        self._sessions: dict[bytes, str] = {}
        """The sessions of blocks that have one."""
        self._wakes: list[Callable[[], None]] = []

    def stored(
        self, block_hash: bytes, parent_hash: bytes, token_ids: Sequence[int], origin: BlockOrigin = NO_ORIGIN
    ) -> None:
        """Records that a block can be found from now on."""
        packed = self._pack.pack(*token_ids)
        names = f"{origin.tenant}\0{origin.adapter}" if origin.adapter else origin.tenant
        self._contents[block_hash] = bytes((len(parent_hash),)) + parent_hash + packed + names.encode()
        if self.keeps_details and origin.session_id:
            self._sessions[block_hash] = origin.session_id
        self._record(block_hash)

    def removed(self, block_hash: bytes) -> None:
        """Records that a block can no longer be found."""
        del self._contents[block_hash]
        self._sessions.pop(block_hash, None)
        self._record(block_hash)

    def moved(self, block_hash: bytes) -> None:
        """Records that a block has moved between tiers. It can still be found."""
        if self.keeps_details:
            self._record(block_hash)

    def cleared(self, but: Iterable[bytes] = ()) -> None:
        """Records that no block can be found any more, except ``but``."""
        self._contents = {block_hash: self._contents[block_hash] for block_hash in but}
        self._sessions = {
            block_hash: session_id for block_hash, session_id in self._sessions.items() if block_hash in self._contents
        }
        self._recent.clear()
        self.sequence += 1
        self._wake()

    def _record(self, block_hash: bytes) -> None:
        self._recent.append(block_hash)
        self.sequence += 1
        if self._wakes:
            self._wake()

    def _wake(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()

    def wake_once(self, wake: Callable[[], None]) -> None:
        """Calls ``wake`` at the next change, during it: ``wake`` must not read the log or raise."""
        self._wakes.append(wake)

    def forget_wake(self, wake: Callable[[], None]) -> None:
        """Cancels ``wake_once``, if ``wake`` has not been called yet."""
        if wake in self._wakes:
            self._wakes.remove(wake)

    def knows_since(self, sequence: int) -> bool:
        """Returns whether all changes after this one are still known."""
        return self.sequence - len(self._recent) <= sequence <= self.sequence

    def changed_since(self, sequence: int) -> Sequence[bytes]:
        """Returns the hashes that were stored or removed after ``sequence``, oldest change first; some may occur
        twice."""
        return list(islice(reversed(self._recent), self.sequence - sequence))[::-1]

    @property
    def hashes(self) -> Iterable[bytes]:
        return self._contents.keys()

    def session_id(self, block_hash: bytes) -> str:
        """Returns the session in which a block was computed; empty if there is none, or it is not kept."""
        return self._sessions.get(block_hash, "")

    def find(self, block_hash: bytes) -> StoredBlock | None:
        content = self._contents.get(block_hash)
        return None if content is None else self._unpacked(block_hash, content)

    def parent_of(self, block_hash: bytes) -> bytes:
        """Returns the hash of the preceding block; empty if there is none, or the block is not found."""
        return _parent_hash(self._contents.get(block_hash, b"\0"))

    def snapshot(self) -> tuple[int, Iterator[StoredBlock]]:
        """Returns the number of blocks and the present blocks, each after its parent. The call takes 3 ms per 100,000
        blocks; each block is built when the iterator reaches it."""
        return len(self._contents), self._parents_first(self._contents.copy())

    def _parents_first(self, contents: dict[bytes, bytes]) -> Iterator[StoredBlock]:
        for block_hash in list(contents):
            chain = []
            while (content := contents.pop(block_hash, None)) is not None:
                chain.append((block_hash, content))
                block_hash = _parent_hash(content)
            for each in reversed(chain):
                yield self._unpacked(*each)

    def _unpacked(self, block_hash: bytes, content: bytes) -> StoredBlock:
        start = 1 + content[0]
        end = start + self._pack.size
        token_ids = self._pack.unpack(content[start:end])
        tenant, _, adapter = content[end:].decode().partition("\0")
        return StoredBlock(block_hash, content[1:start], token_ids, tenant, adapter)


def _parent_hash(content: bytes) -> bytes:
    return content[1 : 1 + content[0]]


class KvEventReader:
    """Reads a log for one subscriber and keeps track of its position. A block comes after its parent, if the log still
    has it: a subscriber may ignore a block whose parent it does not know."""

    def __init__(self, log: KvEventLog, stream_id: str = "", after_sequence: int = 0) -> None:
        """Resumes after a change that another reader of the same log has reported, if the log still knows all later
        changes. Otherwise, and by default, it starts from the beginning."""
        self._log = log
        self._reported = after_sequence if stream_id == log.stream_id else 0
        # Changes up to here have been reported or are pending.
        self._taken = self._reported
        self._pending: dict[bytes, None] = {}
        """The hashes of these changes; the next one is the last."""
        self._noticed = self._taken
        self._later: set[bytes] = set()
        """The hashes that changed after ``_taken``, up to ``_noticed``, and were not returned since."""

    def read(self, max_bytes: int) -> KvChanges:
        """Returns the next changes for the mirror: at least one block, and then up to ``max_bytes`` on the wire. Empty
        when there is nothing new."""
        cleared = not self._log.knows_since(self._taken)
        if cleared:
            self._reported = 0
            self._take(self._log.hashes)
        elif not self._pending:
            self._take(self._log.changed_since(self._taken))
        self._later.update(self._log.changed_since(self._noticed))
        self._noticed = self._log.sequence
        removed, stored = self._take_changes(max_bytes)
        if not self._pending:
            self._reported = self._taken
        return KvChanges(self._reported, cleared, removed, stored)

    @property
    def is_up_to_date(self) -> bool:
        return self._reported == self._log.sequence

    def _take(self, hashes: Iterable[bytes]) -> None:
        self._pending = dict.fromkeys(reversed([*hashes]))
        self._taken = self._noticed = self._log.sequence
        self._later.clear()

    def _take_changes(self, max_bytes: int) -> tuple[list[bytes], list[StoredBlock]]:
        removed: list[bytes] = []
        stored: list[StoredBlock] = []
        num_bytes = 0
        while self._pending and num_bytes < max_bytes:
            block_hash = self._next_hash()
            block = self._log.find(block_hash)
            if block is None:
                removed.append(block_hash)
                num_bytes += _PART_BYTES + len(block_hash)
            else:
                stored.append(block)
                # An upper bound: a token takes up to 5 bytes.
                num_bytes += _PART_BYTES + len(block_hash) + len(block.parent_hash) + 5 * len(block.token_ids)
                num_bytes += _PART_BYTES + len(block.adapter.encode()) if block.adapter else 0
        return removed, stored

    def _next_hash(self) -> bytes:
        block_hash, _ = self._pending.popitem()
        while self._may_lack(parent_hash := self._log.parent_of(block_hash)):
            self._pending[block_hash] = None
            self._pending.pop(parent_hash, None)
            block_hash = parent_hash
        self._later.discard(block_hash)
        return block_hash

    def _may_lack(self, block_hash: bytes) -> bool:
        return block_hash in self._log.hashes and (block_hash in self._pending or block_hash in self._later)
