"""Rows whose grammars are not compiled yet: their first token is put off to a later step, so that no other row waits
for a compiler. Knows no thread and no device.

Put off is the last token of the row's history, out of which its next one comes. Where that token is a block's last, it
is not: rows may share a block from the next plan on, and then it must be whole.
"""

import msgspec

from penstock.models.rows import Row, RowTable
from penstock.scheduler.plan import Chunk, RowResult, StepPlan


class PutOff:
    """The rows that wait, and what a plan is without them."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def add(self, row: Row) -> None:
        """A row with a grammar begins."""
        self._rows[row.number] = row

    def left_of(self, plan: StepPlan, table: RowTable) -> tuple[StepPlan, list[RowResult]]:
        """What a plan, which was applied to the rows, is without the tokens that wait; and the results of rows that
        have nothing else in it. All of it where only rows that wait are in it: they keep nobody else waiting."""
        self._forget(table)
        if not self._rows:
            return plan, []
        numbers = [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]
        if all(number in self._rows for number in numbers):
            return plan, []
        chunks = [self._cut(chunk, table) for chunk in plan.chunks]
        chunks = [chunk for chunk in chunks if chunk.start < chunk.end]
        decodes = [decode for decode in plan.decodes if decode.row not in self._rows]
        left = {chunk.row for chunk in chunks} | {decode.row for decode in decodes}
        others = [table[number] for number in numbers if number not in left]
        results = [RowResult(row.number, row.epoch, row.num_computed, []) for row in others]
        return msgspec.structs.replace(plan, chunks=chunks, decodes=decodes), results

    def _forget(self, table: RowTable) -> None:
        """Those that wait no more, were dropped, or are not put off."""
        for row in list(self._rows.values()):
            is_compiled = row.matcher is None or row.matcher.compiled.done()
            if is_compiled or row.is_dropped or len(row.history) % table.block_size == 0:
                del self._rows[row.number]

    def _cut(self, chunk: Chunk, table: RowTable) -> Chunk:
        """Without the last token of a history that waits."""
        waits = chunk.row in self._rows and chunk.end == len(table[chunk.row].history)
        return Chunk(chunk.row, chunk.start, chunk.end - 1) if waits else chunk
