"""How many drafts each row gets in a step: what the most tokens a second are expected of."""

from collections.abc import Sequence
from typing import NamedTuple

MIN_CHANCE = 0.05
"""Drafts with less are not worth thinking about."""
MIN_GAIN = 1.02
"""How many times as many tokens a second drafts must bring as none would: what is known of both is not exact."""


class Lengths(NamedTuple):
    """What was chosen."""

    counts: list[int]
    """Drafts of each row."""
    token_s: float
    """Seconds for a token that the step then brings, as expected."""


def choose_lengths(chances: Sequence[Sequence[float]], num_certain: int, seconds: Sequence[float]) -> Lengths:
    """Maximises (num_certain + sum of the chances of the drafts) / seconds[number of drafts], if that is ``MIN_GAIN``
    times what it is without drafts.

    ``chances``: of each row's drafts, that it and those before it are right, so they fall; ``num_certain`` tokens come
    whatever is drafted; ``seconds``: of the step with so many drafts, for as many as there is room for. Drafts are
    taken by falling chance, whoever's they are. The best number of them may lie behind a worse one, where seconds go
    by steps, so all are looked at.
    """
    candidates = [(chance, index) for index, row in enumerate(chances) for chance in row if chance >= MIN_CHANCE]
    candidates.sort(reverse=True)
    counts = [0] * len(chances)
    expected = float(num_certain)
    best, num_best = MIN_GAIN * expected / seconds[0], 0
    for number, ((chance, _), step_s) in enumerate(zip(candidates, seconds[1:], strict=False), 1):
        expected += chance
        if expected > best * step_s:
            best, num_best = expected / step_s, number
    for _, index in candidates[:num_best]:
        counts[index] += 1
    return Lengths(counts, 1.0 / best if num_best else seconds[0] / num_certain)
