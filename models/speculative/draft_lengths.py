"""Chooses how many drafts each row gets in a step, to maximise the expected tokens per second."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

MIN_CHANCE = 0.05
"""Drafts with a lower probability are ignored."""
MIN_GAIN = 1.03
"""The factor by which drafts must raise the tokens per second, since both estimates are inexact."""


class DraftLengths(NamedTuple):
    """The chosen numbers of drafts."""

    counts: list[int]
    token_s: float
    """The expected seconds per token of the step."""


def choose_lengths(acceptance: Sequence[Sequence[float]], num_certain: int, seconds: Sequence[float]) -> DraftLengths:
    """Maximises (num_certain + sum of the probabilities of the drafts) / seconds[number of drafts]. Chooses no
    drafts if the maximum is not above ``MIN_GAIN`` times the value without them.

    ``acceptance`` has, for each of a row's drafts, the probability that it and those before it are right, so the
    values fall. ``num_certain`` tokens come without drafts. ``seconds[n]`` is the time of the step with n drafts, for
    as many as there is room for. Drafts are taken in the order of their probability, from any row. All numbers are
    tried: the time may grow in jumps, so the best number may be above a worse one.
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
    """The chosen number of rounds."""

    number: int
    """0 if no number pays."""
    counts: list[int]
    """The expected drafts of each row."""
    token_s: float
    """The expected seconds per token of the step, proposals included."""


def choose_rounds(
    acceptance: Sequence[Sequence[float]],
    num_certain: int,
    seconds: Sequence[float],
    proposal_s: Callable[[int], float],
    last: int,
) -> Rounds:
    """Chooses how many rounds a drafter runs, if each draft takes one: like ``choose_lengths``, but before there are
    drafts, so ``acceptance`` is what is expected of them. ``proposal_s(k)`` returns the seconds to propose k drafts
    of each row. ``last`` is the previous choice: numbers near it are tried first, since it changes little."""
    most = max(map(len, acceptance), default=0)

    def expect(number: int) -> Rounds:
        with_proposals = [seconds[0], *(step_s + proposal_s(number) for step_s in seconds[1:])]
        counts, token_s = choose_lengths([row[:number] for row in acceptance], num_certain, with_proposals)
        return Rounds(number if any(counts) else 0, counts, token_s)

    def best(numbers: Iterable[int]) -> Rounds:
        return min((expect(number) for number in numbers), key=attrgetter("token_s"))

    near = {number for number in (1, last - 1, last, last + 1) if 1 <= number <= most}
    found = best(sorted(near)) if near else Rounds(0, [0] * len(acceptance), seconds[0] / num_certain)
    # The best number may be above worse ones.
    return found if found.number or len(near) == most else best(range(1, most + 1))
