"""The indexes of rows' own histories or predictions, with bounded memory and bounded time per step."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from penstock.models.batch.rows import Row
from penstock.models.speculative.token_index import Cursor, TokenIndex

PORTION = 2048
"""The most tokens that a step indexes, in about a millisecond. A long prompt takes several steps."""

MAX_INDEX_BYTES = 256 << 20
BYTES_PER_TOKEN = 192
"""The most that an index takes, which is if no pair occurs twice. The tokens themselves are not included."""
MAX_INDEXED = MAX_INDEX_BYTES // BYTES_PER_TOKEN
"""The most tokens that are indexed, over all rows. Later tokens are not found."""


class RowIndexes:
    """A cursor in its own tokens for each row."""

    def __init__(
        self, max_indexed: int = MAX_INDEXED, tokens_of: Callable[[Row], list[int]] = attrgetter("history")
    ) -> None:
        """``tokens_of`` returns the tokens of a row to index."""
        self._tokens_of = tokens_of
        self._cursors: dict[Row, Cursor] = {}
        self.room = max_indexed
        """The number of tokens that may still be indexed."""

    def cursor(self, row: Row) -> Cursor:
        """Returns the row's cursor, created on first use."""
        cursor = self._cursors.get(row)
        if cursor is None:
            cursor = self._cursors[row] = Cursor(TokenIndex(self._tokens_of(row)))
        return cursor

    def extend(self, rows: Sequence[Row], portion: int = PORTION) -> int:
        """Indexes what is new in the rows' tokens, up to ``portion`` tokens. Returns the rest of the portion."""
        for row in rows:
            done = self.cursor(row).index.extend(min(portion, self.room))
            self.room -= done
            portion -= done
        return portion

    def drop_row(self, row: Row) -> None:
        cursor = self._cursors.pop(row, None)
        if cursor is not None:
            self.room += cursor.index.num_indexed


def confidences(length: int, num_drafts: int) -> list[float]:
    """Returns the probability of each draft after a match of ``length`` tokens, given that the drafts before it are
    right, which makes the match longer. n / (n + 2) is a guess that orders drafts well enough. Results correct it."""
    return [n / (n + 2) for n in range(length, length + num_drafts)]
