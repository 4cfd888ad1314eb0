"""How likely drafts are right: what a drafter thinks, corrected by what came of drafts before. Knows no rows, no time
and no tokens."""

from collections.abc import Sequence

MAX_CHANCE = 0.98
"""Of a draft. No run of good ones proves the next."""

NUM_CLASSES = 16
CLASS_MEMORY = 0.99
CLASS_WEIGHT = 4.0
"""Of the drafter's own estimate beside what was seen, in drafts."""

ROW_MEMORY = 0.9
ROW_WEIGHT = 1.0
"""Of the position before, beside what was seen at a position, in drafts that were expected to be right."""


class RowChances:
    """How a row's drafts fared: for each position, drafts that were right, and that were expected to be; old ones
    count less."""

    __slots__ = ("expected", "right")

    def __init__(self, max_drafts: int) -> None:
        self.right = [0.0] * max_drafts
        self.expected = [0.0] * max_drafts


class DraftChances:
    """Turns a drafter's confidences into chances.

    A draft of confidence c is right, all rows taken together, as often as those of its class were of late:
    q(c) = (right + w c) / (seen + w). In a row, at position i, it is q times the row's factor
    f_i = (right_i + v f_(i-1)) / (expected_i + v), f_0 = 1: what came of the row's drafts there, by what q had promised
    of them; of positions that were seldom tried, what the ones before them have.
    """

    def __init__(self) -> None:
        self._right = [0.0] * (NUM_CLASSES + 1)
        self._seen = [0.0] * (NUM_CLASSES + 1)

    def estimate(self, row: RowChances, confidences: Sequence[float]) -> list[float]:
        """For each draft the chance that it and all before it are right."""
        chances = []
        chance = factor = 1.0
        for confidence, right, expected in zip(confidences, row.right, row.expected, strict=False):
            factor = (right + ROW_WEIGHT * factor) / (expected + ROW_WEIGHT)
            chance *= min(MAX_CHANCE, factor * self._of_class(confidence))
            chances.append(chance)
        return chances

    def learn(self, row: RowChances, confidences: Sequence[float], num_right: int) -> None:
        """So many of the first drafts were right; the one behind them was not, if there is one, and those behind that
        tell nothing."""
        for position, confidence in enumerate(confidences[: num_right + 1]):
            is_right = position < num_right
            at, promised = round(confidence * NUM_CLASSES), self._of_class(confidence)
            row.right[position] = ROW_MEMORY * row.right[position] + is_right
            row.expected[position] = ROW_MEMORY * row.expected[position] + promised
            self._right[at] = CLASS_MEMORY * self._right[at] + is_right
            self._seen[at] = CLASS_MEMORY * self._seen[at] + 1.0

    def _of_class(self, confidence: float) -> float:
        at = round(confidence * NUM_CLASSES)
        return (self._right[at] + CLASS_WEIGHT * confidence) / (self._seen[at] + CLASS_WEIGHT)
