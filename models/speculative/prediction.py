"""Drafts from the output that a request predicts: the tokens that follow the output's current place in the prediction.

The place advances with the output. Where the output differs from the prediction, the place is searched for again: after
the longest suffix of the output that occurs in the prediction. Among several such places, it is the one nearest to
where the output would be if tokens had only been replaced. If no two tokens match, the newest token may match one that
is a little ahead; otherwise one or two tokens are assumed to have been replaced.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from penstock.models.batch.rows import Row
from penstock.models.speculative.drafter import Proposal, Wanted
from penstock.models.speculative.row_indexes import RowIndexes, confidences
from penstock.models.speculative.token_index import MAX_OCCURRENCES

LONGEST = 16
"""The maximum number of tokens that are compared to find the place again."""
NEAR = 64
"""A match of two or three tokens is trusted up to this far from where it is expected."""
TRUSTED = 4
"""A match of this many tokens is trusted everywhere."""
WINDOW = 16
"""How far ahead a single token is searched for."""
MAX_REPLACED = 2
"""How many consecutive tokens are assumed to have been replaced."""
PRIOR = 4
"""A bonus to the number of matching tokens, because the caller expects this output."""


class _Place(NamedTuple):
    """A place in a prediction."""

    place: int
    """The index of the next token."""
    length: int
    """The number of tokens before it that match the output."""
    is_trusted: bool = True


class _Alignment:
    """The place at which a row's output was last found in its prediction."""

    __slots__ = ("differs", "history_length", "length", "place")

    def __init__(self, history_length: int) -> None:
        self.set(0, 0, history_length)

    def set(self, place: int, length: int, history_length: int) -> None:
        self.place, self.length = place, length
        """The same as in ``_Place``."""
        self.history_length = history_length
        """The length of the history at that time."""
        self.differs = False
        """Whether the output since then differs from the prediction."""


class Predictions:
    """Proposes drafts from the rows' predictions."""

    def __init__(self) -> None:
        self._indexes = RowIndexes(tokens_of=attrgetter("prediction"))
        self._alignments: dict[Row, _Alignment] = {}

    def propose(self, wanted: Sequence[Wanted]) -> dict[Row, Proposal]:
        """Returns the proposals for the rows whose prediction may continue them. The rows' histories are complete."""
        wanted = [one for one in wanted if one.row.prediction]
        self._indexes.extend([row for row, _ in wanted])
        return {row: proposal for row, most in wanted if (proposal := self._propose(row, most)) is not None}

    def drop_row(self, row: Row) -> None:
        self._indexes.drop_row(row)
        self._alignments.pop(row, None)

    def _propose(self, row: Row, most: int) -> Proposal | None:
        found = self._find(row)
        if found is None:
            return None
        drafts = row.prediction[found.place : found.place + most]
        if not drafts:
            return None
        if found.is_trusted:
            return Proposal(drafts, confidences(found.length + PRIOR, len(drafts)), is_predicted=True)
        # If the first draft is right, so is the place.
        sure = confidences(found.length + 2, 1) + confidences(found.length + 1 + PRIOR, len(drafts) - 1)
        return Proposal(drafts, sure, is_predicted=True)

    def _find(self, row: Row) -> _Place | None:
        """Finds the place of the row's output in its prediction, and remembers it if it is trusted."""
        history, prediction = row.history, row.prediction
        last = self._alignments.get(row)
        if last is None:
            last = self._alignments[row] = _Alignment(row.num_prompt_tokens)
        num_new = len(history) - last.history_length
        expected = last.place + num_new
        if not last.differs:
            if prediction[last.place : expected] == history[last.history_length :]:
                last.set(expected, last.length + num_new, len(history))
                return _Place(expected, last.length)
            last.differs = True
        longest = min(LONGEST, len(history) - row.num_prompt_tokens)
        match = self._indexes.cursor(row).find(history, longest, MAX_OCCURRENCES)
        if match.length:
            place = min(match.places, key=lambda place: abs(place - expected))
            is_trusted = match.length >= TRUSTED or abs(place - expected) <= NEAR
            if is_trusted:
                last.set(place, match.length, len(history))
            return _Place(place, match.length, is_trusted)
        ahead = prediction[last.place : last.place + WINDOW]
        if history[-1] in ahead:
            return _Place(last.place + ahead.index(history[-1]) + 1, 1, is_trusted=False)
        return _Place(expected, 0, is_trusted=False) if num_new <= MAX_REPLACED else None
