"""Provides a mirror of the prefix map with which blocks can be found, and with the changes since its last update.

Only the hash of a change is kept. A reader looks up whether that hash can be found now, so reporting a change twice
does no harm, and changes that cancel out cost nothing. This module knows hashes and tokens, neither blocks nor
subscribers.
"""

import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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


NO_ORIGIN = BlockOrigin()


class StoredBlock(NamedTuple):
    """A block that can be found."""

    block_hash: bytes
    parent_hash: bytes
    """Empty for the first block of a sequence."""
    token_ids: tuple[int, ...]
    tenant: str = ""
    """The tenant whose requests can find it; empty if it was stored without one."""


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
        """Whether a move between tiers counts as a change, and whether origins are kept."""
        self.stream_id = secrets.token_hex(8)
        """Identifies this log; sequence numbers are valid only within it."""
        self.sequence = 1
        """The number of the last change. The empty cache is the first one."""
        # Hashes of the last changes, up to ``sequence``.
        self._recent: deque[bytes] = deque(maxlen=max_changes)
        self._pack = struct.Struct(f"<{block_size}I")
        # Hash -> the length of the parent's hash, that hash, the token ids and the tenant: 140 bytes for 16 tokens.
        self._contents: dict[bytes, bytes] = {}
        # The origins that readers need: those of blocks that begin a sequence, and of blocks with a session.
        self._origins: dict[bytes, BlockOrigin] = {}
        self._wakes: list[Callable[[], None]] = []

    def stored(
        self, block_hash: bytes, parent_hash: bytes, token_ids: Sequence[int], origin: BlockOrigin = NO_ORIGIN
    ) -> None:
        """Records that a block can be found from now on."""
        packed = self._pack.pack(*token_ids)
        self._contents[block_hash] = bytes((len(parent_hash),)) + parent_hash + packed + origin.tenant.encode()
        if self.keeps_details and (origin.session_id or not parent_hash):
            self._origins[block_hash] = origin
        self._record(block_hash)

    def removed(self, block_hash: bytes) -> None:
        """Records that a block can no longer be found."""
        del self._contents[block_hash]
        self._origins.pop(block_hash, None)
        self._record(block_hash)

    def moved(self, block_hash: bytes) -> None:
        """Records that a block has moved between tiers. It can still be found."""
        if self.keeps_details:
            self._record(block_hash)

    def cleared(self, but: Iterable[bytes] = ()) -> None:
        """Records that no block can be found any more, except ``but``."""
        self._contents = {block_hash: self._contents[block_hash] for block_hash in but}
        self._origins = {
            block_hash: origin for block_hash, origin in self._origins.items() if block_hash in self._contents
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

    def origin(self, block_hash: bytes) -> BlockOrigin:
        """Returns the origin of a block; an empty one if none is kept."""
        return self._origins.get(block_hash, NO_ORIGIN)

    def find(self, block_hash: bytes) -> StoredBlock | None:
        content = self._contents.get(block_hash)
        return None if content is None else self.unpacked(block_hash, content)

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """Returns every block as its hash and its data for ``unpacked``, in the order in which they were stored.
        Takes 3 ms per 100,000 blocks."""
        return list(self._contents.items())

    def unpacked(self, block_hash: bytes, content: bytes) -> StoredBlock:
        """Returns a block of ``snapshot``."""
        start = 1 + content[0]
        end = start + self._pack.size
        token_ids = self._pack.unpack(content[start:end])
        return StoredBlock(block_hash, content[1:start], token_ids, content[end:].decode())


class KvEventReader:
    """Reads a log for one subscriber and keeps track of its position."""

    def __init__(self, log: KvEventLog, stream_id: str = "", after_sequence: int = 0) -> None:
        """Resumes after a change that another reader of the same log has reported, if the log still knows all later
        changes. Otherwise, and by default, it starts from the beginning."""
        self._log = log
        self._reported = after_sequence if stream_id == log.stream_id else 0
        # Changes up to here have been reported or are pending.
        self._taken = self._reported
        self._pending: deque[bytes] = deque()

    def read(self, max_bytes: int) -> KvChanges:
        """Returns the next changes for the mirror: at least one block, and then up to ``max_bytes`` on the wire. Empty
        when there is nothing new."""
        cleared = not self._log.knows_since(self._taken)
        if cleared:
            self._reported = 0
            self._take(self._log.hashes)
        elif not self._pending:
            # Ordered by each block's last change, so that a block comes after the one that it follows.
            self._take(reversed(dict.fromkeys(reversed(self._log.changed_since(self._taken)))))
        removed, stored = self._take_changes(max_bytes)
        if not self._pending:
            self._reported = self._taken
        return KvChanges(self._reported, cleared, removed, stored)

    @property
    def is_up_to_date(self) -> bool:
        return self._reported == self._log.sequence

    def _take(self, hashes: Iterable[bytes]) -> None:
        self._pending = deque(hashes)
        self._taken = self._log.sequence

    def _take_changes(self, max_bytes: int) -> tuple[list[bytes], list[StoredBlock]]:
        removed: list[bytes] = []
        stored: list[StoredBlock] = []
        num_bytes = 0
        while self._pending and num_bytes < max_bytes:
            block_hash = self._pending.popleft()
            block = self._log.find(block_hash)
            if block is None:
                removed.append(block_hash)
                num_bytes += _PART_BYTES + len(block_hash)
            else:
                stored.append(block)
                # An upper bound: a token takes up to 5 bytes.
                num_bytes += _PART_BYTES + len(block_hash) + len(block.parent_hash) + 5 * len(block.token_ids)
        return removed, stored
