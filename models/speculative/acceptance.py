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


class AcceptanceEstimate:
    """Of rows that are sampled alike: how often drafts of a confidence were right of late."""

    __slots__ = ("_right", "_seen")

    def __init__(self) -> None:
        self._right = [0.0] * (NUM_CLASSES + 1)
        self._seen = [0.0] * (NUM_CLASSES + 1)

    def of(self, confidence: float) -> float:
        """The chance of such a draft: (right + w confidence) / (seen + w)."""
        at = round(confidence * NUM_CLASSES)
        return (self._right[at] + CLASS_WEIGHT * confidence) / (self._seen[at] + CLASS_WEIGHT)

    def learn(self, confidence: float, is_right: bool) -> None:
        """What came of a draft."""
        at = round(confidence * NUM_CLASSES)
        self._right[at] = CLASS_MEMORY * self._right[at] + is_right
        self._seen[at] = CLASS_MEMORY * self._seen[at] + 1.0


class RowAcceptance:
    """Turns a drafter's confidences in drafts of a row into chances.

    A draft of confidence c is right, all rows taken together that are sampled alike, as often as those of its class
    were: q(c). In this row, at position i, it is q times the row's factor
    f_i = (right_i + v f_(i-1)) / (expected_i + v), f_0 = 1: what came of the row's drafts there, by what q had promised
    of them, old ones counting less; of positions that were seldom tried, what the ones before them have.
    """

    __slots__ = ("_classes", "_expected", "_right")

    def __init__(self, max_drafts: int, classes: AcceptanceEstimate) -> None:
        self._classes = classes
        self._right = [0.0] * max_drafts
        self._expected = [0.0] * max_drafts

    def estimate(self, confidences: Sequence[float]) -> list[float]:
        """For each draft the chance that it and all before it are right."""
        acceptance = []
        chance = factor = 1.0
        for confidence, right, expected in zip(confidences, self._right, self._expected, strict=False):
            factor = (right + ROW_WEIGHT * factor) / (expected + ROW_WEIGHT)
            chance *= min(MAX_CHANCE, factor * self._classes.of(confidence))
            acceptance.append(chance)
        return acceptance

    def learn(self, confidences: Sequence[float], num_right: int) -> None:
        """So many of the first drafts were right; the one behind them was not, if there is one, and those behind that
        tell nothing."""
        for position, confidence in enumerate(confidences[: num_right + 1]):
            is_right = position < num_right
            self._right[position] = ROW_MEMORY * self._right[position] + is_right
            self._expected[position] = ROW_MEMORY * self._expected[position] + self._classes.of(confidence)
            self._classes.learn(confidence, is_right)
