"""Defers the next token of rows whose masks are late to a later step, so that no other row waits for a grammar.

The step omits the last token of such a row's history, which produces the next one. If that token ends a prompt and is
the last of a block, it is computed nevertheless: from the next plan on rows may share the block, so it must be whole.
"""

from collections.abc import Callable

import msgspec

from penstock.models.batch.rows import Row, RowTable
from penstock.scheduler.plan import Chunk, RowResult, StepPlan


def without_late(plan: StepPlan, table: RowTable, is_ready: Callable[[Row], bool]) -> tuple[StepPlan, list[RowResult]]:
    """Returns an applied plan without the deferred tokens, and the results of rows that have nothing else in it."""
    numbers = [chunk.row for chunk in plan.chunks if chunk.end == len(table[chunk.row].history)]
    numbers += [decode.row for decode in plan.decodes]
    late = {number for number in numbers if not is_ready(table[number])}
    if not late:
        return plan, []
    chunks = [_cut(chunk, table) if chunk.row in late else chunk for chunk in plan.chunks]
    chunks = [chunk for chunk in chunks if chunk.start < chunk.end]
    decodes = [decode for decode in plan.decodes if decode.row not in late]
    left = {chunk.row for chunk in chunks} | {decode.row for decode in decodes}
    idle = [table[number] for number in numbers if number not in left]
    results = [RowResult(row.number, row.epoch, row.num_computed, []) for row in idle]
    return msgspec.structs.replace(plan, chunks=chunks, decodes=decodes), results


def _cut(chunk: Chunk, table: RowTable) -> Chunk:
    """Returns the chunk without its last token, which is deferred, unless that completes a block."""
    is_whole_block = chunk.end % table.block_size == 0
    return chunk if is_whole_block else Chunk(chunk.row, chunk.start, chunk.end - 1)
