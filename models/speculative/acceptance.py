"""The probability that drafts are right: a drafter's confidence, corrected by the results of earlier drafts."""

from collections.abc import Sequence

MAX_CHANCE = 0.98
"""The highest probability of a draft, however many before it were right."""

NUM_CLASSES = 16
CLASS_MEMORY = 0.99
CLASS_WEIGHT = 4.0
"""The weight of the drafter's own confidence against observed drafts, in drafts."""

ROW_MEMORY = 0.9
ROW_WEIGHT = 1.0
"""The weight of the previous position against what was observed at a position, in drafts expected to be right."""


class AcceptanceEstimate:
    """The share of recent drafts that were right, by confidence, over rows that are sampled alike."""

    __slots__ = ("_right", "_seen")

    def __init__(self) -> None:
        self._right = [0.0] * (NUM_CLASSES + 1)
        self._seen = [0.0] * (NUM_CLASSES + 1)

    def of(self, confidence: float) -> float:
        """Returns the probability that a draft is right: (right + w confidence) / (seen + w)."""
        at = round(confidence * NUM_CLASSES)
        return (self._right[at] + CLASS_WEIGHT * confidence) / (self._seen[at] + CLASS_WEIGHT)

    def learn(self, confidence: float, is_right: bool) -> None:
        at = round(confidence * NUM_CLASSES)
        self._right[at] = CLASS_MEMORY * self._right[at] + is_right
        self._seen[at] = CLASS_MEMORY * self._seen[at] + 1.0


class RowAcceptance:
    """Turns a drafter's confidences in drafts of a row into probabilities.

    Over all rows that are sampled alike, a draft of confidence c is right as often as earlier ones of its class: q(c).
    In this row, at position i, its probability is q times the row's factor
    f_i = (right_i + v f_(i-1)) / (expected_i + v), f_0 = 1: how many of the row's drafts there were right, relative to
    what q predicted, with older drafts counting less. Positions that were seldom tried take the factor before them.
    """

    __slots__ = ("_classes", "_expected", "_right")

    def __init__(self, max_drafts: int, classes: AcceptanceEstimate) -> None:
        self._classes = classes
        self._right = [0.0] * max_drafts
        self._expected = [0.0] * max_drafts

    def estimate(self, confidences: Sequence[float]) -> list[float]:
        """Returns the probability, for each draft, that it and all before it are right."""
        acceptance = []
        chance = factor = 1.0
        for confidence, right, expected in zip(confidences, self._right, self._expected, strict=False):
            factor = (right + ROW_WEIGHT * factor) / (expected + ROW_WEIGHT)
            chance *= min(MAX_CHANCE, factor * self._classes.of(confidence))
            acceptance.append(chance)
        return acceptance

    def learn(self, confidences: Sequence[float], num_right: int) -> None:
        """Records that the first ``num_right`` drafts were right and the next was not. Later ones were not tested."""
        for position, confidence in enumerate(confidences[: num_right + 1]):
            is_right = position < num_right
            self._right[position] = ROW_MEMORY * self._right[position] + is_right
            self._expected[position] = ROW_MEMORY * self._expected[position] + self._classes.of(confidence)
            self._classes.learn(confidence, is_right)
