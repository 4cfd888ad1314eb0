"""How many drafts each row gets in a step: what the most tokens a second are expected of."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

MIN_CHANCE = 0.05
"""Drafts with less are not worth thinking about."""
MIN_GAIN = 1.03
"""How many times as many tokens a second drafts must bring as none would: what is known of both is not exact."""


class DraftLengths(NamedTuple):
    """What was chosen."""

    counts: list[int]
    """Drafts of each row."""
    token_s: float
    """Seconds for a token that the step then brings, as expected."""


def choose_lengths(acceptance: Sequence[Sequence[float]], num_certain: int, seconds: Sequence[float]) -> DraftLengths:
    """Maximises (num_certain + sum of the chances of the drafts) / seconds[number of drafts], if that is ``MIN_GAIN``
    times what it is without drafts.

    ``acceptance`` has, for each of a row's drafts, the probability that it and those before it are right, so the
    values fall. ``num_certain`` tokens come whatever is drafted. ``seconds[n]`` is the time of the step with n drafts,
    for as many as there is room for. Drafts are taken in the order of their probability, from any row. The best number
    may lie beyond a worse one, where the time grows in steps, so all numbers are tried.
    """
    candidates = [(chance, index) for index, row in enumerate(acceptance) for chance in row if chance >= MIN_CHANCE]
    candidates.sort(reverse=True)
    counts = [0] * len(acceptance)
    expected = float(num_certain)
    best, num_best = MIN_GAIN * expected / seconds[0], 0
    for number, ((chance, _), step_s) in enumerate(zip(candidates, seconds[1:], strict=False), 1):
        expected += chance
        if expected > best * step_s:
            best, num_best = expected / step_s, number
    for _, index in candidates[:num_best]:
        counts[index] += 1
    return DraftLengths(counts, 1.0 / best if num_best else seconds[0] / num_certain)


class Rounds(NamedTuple):
    """What was chosen."""

    number: int
    """0: none pays."""
    counts: list[int]
    """Drafts of each row, as expected."""
    token_s: float
    """Seconds for a token that the step then brings, as expected, askings included."""


def choose_rounds(
    acceptance: Sequence[Sequence[float]],
    num_certain: int,
    seconds: Sequence[float],
    asking: Callable[[int], float],
    last: int,
) -> Rounds:
    """How often a drafter is to be asked, where each draft is an asking of its own: as above, but before any draft is
    there, so by what is expected of them. ``asking(k)``: seconds that k drafts of each row take; ``last``: what was
    chosen last, beside which it is looked first, since little changes from step to step."""
    most = max(map(len, acceptance), default=0)

    def expect(number: int) -> Rounds:
        with_asking = [seconds[0], *(step_s + asking(number) for step_s in seconds[1:])]
        counts, token_s = choose_lengths([row[:number] for row in acceptance], num_certain, with_asking)
        return Rounds(number if any(counts) else 0, counts, token_s)

    def best(numbers: Iterable[int]) -> Rounds:
        return min((expect(number) for number in numbers), key=attrgetter("token_s"))

    near = {number for number in (1, last - 1, last, last + 1) if 1 <= number <= most}
    found = best(sorted(near)) if near else Rounds(0, [0] * len(acceptance), seconds[0] / num_certain)
    # The best number may lie behind worse ones.
    return found if found.number or len(near) == most else best(range(1, most + 1))
