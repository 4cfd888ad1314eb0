"""What it takes to ask a drafter: measured when the worker starts, where that is a model, and kept up to date."""

from collections.abc import Callable

from penstock.models.step_costs import StepCosts

ASK_S = 1e-5
"""What asking for a row is taken to take, until it is known."""
MIN_SCALE = 0.1
RATE = 0.1
MAX_SURPRISE = 4.0
"""A long prompt that is looked at for the first time tells nothing of later askings."""


class AskCosts:
    """seconds(rows, rounds, backlog) = scale * (table[rows + backlog] + (rounds - 1) * table[rows]).

    A drafter that is a model of its own takes a step for each draft, of all rows together; the first one reads what it
    has not read yet, too. Any other takes one round, whatever it is asked for.
    """

    def __init__(self, most: int) -> None:
        """``most``: tokens of a step."""
        self._table = StepCosts(most, (ASK_S, 64 * ASK_S))
        self._scale = 1.0

    def measure(self, run: Callable[[int], None], most: int, clock: Callable[[], float]) -> None:
        """``run`` asks for so many rows, up to ``most``, a draft each; ``clock`` tells seconds."""
        self._table.measure(run, most, clock)

    def seconds(self, num_rows: int, rounds: int = 1, backlog: int = 0) -> float:
        """Of asking for so many rows, with so many tokens to read besides each row's newest."""
        first = self._table.seconds(num_rows + backlog)
        return self._scale * (first + (rounds - 1) * self._table.seconds(num_rows))

    def observe(self, num_rows: int, rounds: int, backlog: int, seconds: float) -> None:
        """What an asking took."""
        surprise = min(MAX_SURPRISE, seconds / self.seconds(num_rows, rounds, backlog)) - 1.0
        self._scale = max(MIN_SCALE, self._scale * (1.0 + RATE * surprise))
