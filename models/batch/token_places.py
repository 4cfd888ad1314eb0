"""The positions of a ragged batch's tokens, and where their KV is written."""

import numpy as np

from penstock.models.batch.rows import Ids


def owners_of(token_starts: Ids) -> Ids:
    """Returns the index of each token's row, (T,). Row r's tokens are [token_starts[r], token_starts[r + 1])."""
    return np.repeat(np.arange(len(token_starts) - 1), np.diff(token_starts))


def positions_of(starts: Ids, token_starts: Ids) -> Ids:
    """Returns each token's position, (T,). ``starts`` (R,) are the positions of the rows' first tokens."""
    owners = owners_of(token_starts)
    return np.arange(len(owners)) - token_starts[owners] + starts[owners]


def slots_of(positions: Ids, token_starts: Ids, tables: Ids, block_size: int) -> Ids:
    """Returns where each token's KV is written, (T,): block * block_size + offset. ``tables`` (R, N) are block ids."""
    blocks, offsets = np.divmod(positions, block_size)
    return tables[owners_of(token_starts), blocks] * block_size + offsets
