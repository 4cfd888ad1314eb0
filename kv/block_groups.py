"""The groups of a model's layers whose KV is in blocks of their own, as numbers.

Where a model has layers with a window besides others, its layers are divided into groups of about the same number.
Group 0 keeps the KV of all tokens; the layers of the other groups have windows. A block holds the KV of ``block_size``
tokens in the layers of one group, so all groups take their blocks from one pool. See docs/architecture.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """The groups of a model's layers, and the blocks that sequences need in them."""

    num_windowed: int
    """The number of groups whose layers have a window; 0: one group has all layers."""
    window: int
    """The largest window in tokens, the token itself included."""
    block_size: int
    max_step_tokens: int
    """The maximum number of tokens in a step."""

    @property
    def num_groups(self) -> int:
        """The number of blocks that all groups need for a block of tokens."""
        return 1 + self.num_windowed

    @property
    def num_before(self) -> int:
        """The number of blocks before a block border that a query after it may see."""
        return -(-(self.window - 1) // self.block_size)

    @property
    def most_held(self) -> int:
        """The number of blocks of a windowed group that a sequence needs at most: its window, and a step's tokens."""
        return self.num_before + -(-self.max_step_tokens // self.block_size) + 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that a sequence of this length needs at most, in all groups."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks + self.num_windowed * min(num_blocks, self.most_held)

    def longest(self, num_blocks: int) -> int:
        """Returns the length of the longest sequence that needs no more than this many blocks."""
        in_windows = num_blocks // (1 + self.num_windowed)
        return max(in_windows, num_blocks - self.num_windowed * self.most_held) * self.block_size
