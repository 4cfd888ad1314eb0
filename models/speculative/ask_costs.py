"""What it takes to ask a drafter: measured when the worker starts, where that is a model, and kept up to date."""

from collections.abc import Callable

from penstock.models.speculative.cost_model import StepCost

ASK_S = 1e-5
"""What asking for a row is taken to take, until it is known."""
MIN_SCALE, MIN_TOKEN_S = 0.1, 1e-8
RATE, READ_RATE = 0.1, 0.3
"""How fast an asking's time is learned, and the time of a token that it reads: few askings read many, and tell much."""
MAX_SURPRISE = 4.0
"""A long prompt that is looked at for the first time tells nothing of later askings."""


class DraftCost:
    """seconds(rows, rounds, backlog) = scale * rounds * table[rows] + backlog * token_s.

    A drafter that is a model of its own takes a step for each draft, of all rows together; the first one reads what it
    has not read yet, too. Any other takes one round, whatever it is asked for.
    """

    def __init__(self, most: int) -> None:
        """``most``: tokens of a step."""
        self._table = StepCost(most, (ASK_S, 64 * ASK_S))
        self._scale = 1.0
        self._token_s = ASK_S

    def measure(self, run: Callable[[int], None], most: int, clock: Callable[[], float]) -> None:
        """``run`` asks for so many rows, up to ``most``, a draft each; ``clock`` tells seconds."""
        self._table.measure(run, most, clock)
        self._token_s = self._table.seconds(most) / most

    def seconds(self, num_rows: int, rounds: int = 1, backlog: int = 0) -> float:
        """Of asking for so many rows, with so many tokens to read besides each row's newest."""
        return self._asking_s(num_rows, rounds) + backlog * self._token_s

    def observe(self, num_rows: int, rounds: int, backlog: int, seconds: float) -> None:
        """What an asking took. Both parts learn from it, as far as it is taken to be theirs."""
        expected = self.seconds(num_rows, rounds, backlog)
        surprise = min(MAX_SURPRISE, seconds / expected) - 1.0
        part = self._asking_s(num_rows, rounds) / expected
        self._scale = max(MIN_SCALE, self._scale * (1.0 + RATE * surprise * part))
        self._token_s = max(MIN_TOKEN_S, self._token_s * (1.0 + READ_RATE * surprise * (1.0 - part)))

    def _asking_s(self, num_rows: int, rounds: int) -> float:
        return self._scale * rounds * self._table.seconds(num_rows)
