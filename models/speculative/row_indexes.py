"""The indexes of rows' own histories, bounded in memory and in what a step spends on them."""

from collections.abc import Sequence

from penstock.models.batch.rows import Row
from penstock.models.speculative.token_index import Cursor, TokenIndex

PORTION = 2048
"""Tokens that are indexed in a step at most, about a millisecond: a long prompt is done in several."""

MAX_INDEX_BYTES = 256 << 20
BYTES_PER_TOKEN = 192
"""Of an index in which no pair comes twice, its tokens not counted: the most."""
MAX_INDEXED = MAX_INDEX_BYTES // BYTES_PER_TOKEN
"""Tokens of all rows together. What comes later is not found."""


class RowIndexes:
    """A cursor in its own history for each row."""

    def __init__(self, max_indexed: int = MAX_INDEXED) -> None:
        self._cursors: dict[Row, Cursor] = {}
        self._room = max_indexed

    @property
    def room(self) -> int:
        """Tokens that may yet be indexed."""
        return self._room

    def cursor(self, row: Row) -> Cursor:
        """The row's, made when it is first asked for."""
        cursor = self._cursors.get(row)
        if cursor is None:
            cursor = self._cursors[row] = Cursor(TokenIndex(row.history))
        return cursor

    def extend(self, rows: Sequence[Row], portion: int = PORTION) -> int:
        """Takes in what is new in the rows' histories, as far as the step's portion goes; returns what is left of
        it."""
        for row in rows:
            done = self.cursor(row).index.extend(min(portion, self._room))
            self._room -= done
            portion -= done
        return portion

    def drop_row(self, row: Row) -> None:
        """The row is dropped."""
        cursor = self._cursors.pop(row, None)
        if cursor is not None:
            self._room += cursor.index.num_indexed


def confidences(length: int, num_drafts: int) -> list[float]:
    """How likely drafts are right that follow a match of so many tokens, each if those before it are: it is a longer
    match then. A guess, n / (n + 2), that is good enough to tell better drafts from worse; what comes of them is
    learned."""
    return [n / (n + 2) for n in range(length, length + num_drafts)]
