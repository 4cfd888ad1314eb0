"""Cuts a batch into groups of rows that one call of dense attention computes, once per step for each kind of window."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.reference.ops import attention, visible
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.batch.rows import Ids


class Ragged(Protocol):
    """T tokens of R rows; the properties are those of ``Batch``."""

    @property
    def ends(self) -> Ids: ...

    @property
    def token_starts(self) -> Ids: ...

    @property
    def positions(self) -> Ids: ...

    @property
    def tables(self) -> Ids: ...


MAX_GATHERED_TOKENS = 1 << 18
"""The limit of keys copied at a time for rows with one token; bounds the memory of a step."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B rows with Q queries each, contiguous in the batch's tokens [token_start, token_end)."""

    token_start: int
    token_end: int
    num_rows: int
    table: Tensor
    """(B, N) block ids."""
    reach: int
    """No row's query i sees a gathered slot from ``reach + i`` on."""
    mask: Tensor | None
    """(B, Q, N * block_size) bool: the gathered slots that a query sees; None if it sees all."""


def attention_groups(
    batch: Ragged,
    window: int | None,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    *,
    chunked: bool = False,
    tables: Ids | None = None,
) -> list[AttentionGroup]:
    """Returns groups in the order of tokens. Tables are padded with the page ``num_blocks``. ``window`` and ``chunked``
    are those of ``visible``. ``tables`` are those of the layers, by default the batch's."""
    tables = batch.tables if tables is None else tables
    neighbours = _neighbours(batch, block_size)
    return [_group(batch, tables, rows, window, chunked, num_blocks, block_size, device) for rows in neighbours]


def grouped_attention(
    pages: KVPages,
    layer: int,
    query: Tensor,
    groups: list[AttentionGroup],
    *,
    scale: float | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes one layer's attention over its pages, in which the step's KV is already written. ``query`` is (T, H, D),
    as is the result, which is undefined for tokens of no group; the rest is that of ``attention``."""
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in groups:
        keys, values = pages.gather(layer, group.table)
        part = query[group.token_start : group.token_end].view(group.num_rows, -1, *query.shape[1:])
        seen = attention(part, keys, values, group.mask, group.reach, scale=scale, cap=cap, sinks=sinks)
        mixed[group.token_start : group.token_end] = seen.flatten(0, 1)
    return mixed


def _neighbours(batch: Ragged, block_size: int) -> Iterator[slice]:
    """Yields the rows of each group: rows with one token as long as the shortest has about half the keys of the
    longest, so that few keys are gathered needlessly; every other row forms its own group."""
    ends, num_tokens = batch.ends.tolist(), np.diff(batch.token_starts).tolist()
    begin = 0
    for row in range(1, len(ends) + 1):
        longest = ends[begin]
        if (
            row == len(ends)
            or num_tokens[row] > 1
            or num_tokens[begin] > 1
            or longest > 2 * ends[row] + 8 * block_size
            or longest * (row + 1 - begin) > MAX_GATHERED_TOKENS
        ):
            yield slice(begin, row)
            begin = row


def _group(
    batch: Ragged,
    tables: Ids,
    rows: slice,
    window: int | None,
    chunked: bool,
    num_blocks: int,
    block_size: int,
    device: torch.device,
) -> AttentionGroup:
    num_rows = rows.stop - rows.start
    token_start, token_end = int(batch.token_starts[rows.start]), int(batch.token_starts[rows.stop])
    positions = batch.positions[token_start:token_end].reshape(num_rows, -1)
    ends = positions[:, -1] + 1
    # The first block that any query of the row sees; earlier ones are not read.
    lowest = _lowest_seen(positions[:, 0], window, chunked)
    first = lowest // block_size
    counts = -(-ends // block_size) - first
    columns = np.arange(int(counts.max()))
    index = np.minimum(first[:, None] + columns, tables.shape[1] - 1)
    table = np.where(columns < counts[:, None], np.take_along_axis(tables[rows], index, axis=1), num_blocks)
    lengths = ends - first * block_size
    # Whole pages are read, so that rows stay dense in memory: strided operands would be copied first.
    num_keys = table.shape[1] * block_size
    mask = None
    if positions.shape[1] > 1 or int(lengths.min()) < num_keys or np.any(lowest > first * block_size):
        seen = torch.from_numpy(first[:, None, None] * block_size + np.arange(num_keys))
        mask = visible(torch.from_numpy(positions)[:, :, None], seen, window, chunked).to(device)
    return AttentionGroup(
        token_start=token_start,
        token_end=token_end,
        num_rows=num_rows,
        table=torch.from_numpy(table).to(device),
        reach=int((positions[:, 0] - first * block_size).max()) + 1,
        mask=mask,
    )


def _lowest_seen(positions: Ids, window: int | None, chunked: bool) -> Ids:
    """Returns the first position that a query at each of the positions sees."""
    if window is None:
        return np.zeros_like(positions)
    return positions // window * window if chunked else np.maximum(positions - window + 1, 0)
