"""Cuts a batch into groups of rows whose attention is one call of dense attention, for backends that have nothing
ragged.

The work is done once a step for each kind of window, not once a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.reference import visible
from penstock.models.batch import Batch

MAX_GATHERED_TOKENS = 1 << 18
"""Keys copied at a time: bounds the memory of a step."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B rows with Q queries each, as neighbours in the batch's tokens [token_start, token_end)."""

    token_start: int
    token_end: int
    num_rows: int
    table: Tensor
    """(B, N) block ids."""
    lengths: Tensor
    """(B,): slots of the gathered pages that are the row's."""
    mask: Tensor | None
    """(B, Q, N * block_size) bool: which gathered slots a query sees; None where it sees all."""


def attention_groups(
    batch: Batch, window: int | None, num_blocks: int, block_size: int, device: torch.device
) -> list[AttentionGroup]:
    """Groups in the order of tokens. Tables are padded with the page ``num_blocks``."""
    return [_group(batch, spans, window, num_blocks, block_size, device) for spans in _spans(batch, block_size)]


_Span = tuple[int, int, int]
"""Row of the batch, first and last + 1 of its tokens that take part."""


def _spans(batch: Batch, block_size: int) -> Iterator[list[_Span]]:
    """Rows of one token together, while the shortest has at least half the blocks of the longest; others alone, in
    pieces."""
    decodes: list[_Span] = []
    for row in range(len(batch.rows)):
        begin, end = int(batch.token_starts[row]), int(batch.token_starts[row + 1])
        if end - begin == 1:
            longest = int(batch.ends[decodes[0][0]]) if decodes else 0
            wasteful = longest > 2 * int(batch.ends[row]) + 8 * block_size
            if decodes and (wasteful or longest * (len(decodes) + 1) > MAX_GATHERED_TOKENS):
                yield decodes
                decodes = []
            decodes.append((row, begin, end))
            continue
        if decodes:
            yield decodes
            decodes = []
        yield [(row, begin, end)]
    if decodes:
        yield decodes


def _group(
    batch: Batch, spans: list[_Span], window: int | None, num_blocks: int, block_size: int, device: torch.device
) -> AttentionGroup:
    rows = np.array([row for row, _, _ in spans])
    token_start, token_end = spans[0][1], spans[-1][2]
    positions = batch.positions[token_start:token_end].reshape(len(spans), -1)
    ends = positions[:, -1] + 1
    # The first block that any query of the row sees; what lies before it is not read.
    first = np.zeros_like(ends) if window is None else np.maximum(positions[:, 0] - window + 1, 0) // block_size
    counts = -(-ends // block_size) - first
    columns = np.arange(int(counts.max()))
    index = np.minimum(first[:, None] + columns, batch.tables.shape[1] - 1)
    table = np.where(columns < counts[:, None], batch.tables[rows[:, None], index], num_blocks)
    lengths = ends - first * block_size
    # Whole pages are read, so that rows stay dense in memory: products with strides in them are copied first.
    num_keys = table.shape[1] * block_size
    mask = None
    if positions.shape[1] > 1 or int(lengths.min()) < num_keys or (window is not None and num_keys > window):
        seen = torch.from_numpy(first[:, None, None] * block_size + np.arange(num_keys))
        mask = visible(torch.from_numpy(positions)[:, :, None], seen, window).to(device)
    return AttentionGroup(
        token_start=token_start,
        token_end=token_end,
        num_rows=len(spans),
        table=torch.from_numpy(table).to(device),
        lengths=torch.from_numpy(lengths).to(device),
        mask=mask,
    )
