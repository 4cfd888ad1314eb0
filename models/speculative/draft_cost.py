"""The time of proposals: measured at worker start if the drafter is a model, and then learned from each proposal."""

from collections.abc import Callable

from penstock.models.speculative.cost_model import StepCost

PROPOSAL_S = 1e-5
"""The assumed time of a proposal for one row, until it is known."""
MIN_SCALE, MIN_TOKEN_S = 0.1, 1e-8
RATE, READ_RATE = 0.1, 0.3
"""Learning rates of the time of a proposal, and of the time per token that it reads: the latter is higher, since few
proposals read many tokens, and those reveal much."""
MAX_SURPRISE = 4.0
"""Cap on an observed time relative to the expected one. The first look at a long prompt predicts no later proposal."""


class DraftCost:
    """seconds(rows, rounds, backlog) = scale * rounds * table[rows] + backlog * token_s.

    A drafter that is a model takes one step per draft, for all rows together; its first step also reads the backlog.
    Any other drafter takes one round, however many drafts it proposes.
    """

    def __init__(self, most: int) -> None:
        """``most`` is the maximum number of tokens in a step."""
        self._table = StepCost(most, (PROPOSAL_S, 64 * PROPOSAL_S))
        self._scale = 1.0
        self._token_s = PROPOSAL_S

    def measure(self, run: Callable[[int], object], most: int, clock: Callable[[], float]) -> None:
        """Measures ``run(n)``, which proposes a draft for each of n rows, up to ``most``. ``clock`` returns seconds."""
        self._table.measure(run, most, clock)
        self._token_s = self._table.seconds(most) / most

    def seconds(self, num_rows: int, rounds: int = 1, backlog: int = 0) -> float:
        """Returns the time of proposals for rows that have ``backlog`` tokens to read besides each row's newest."""
        return self._proposal_s(num_rows, rounds) + backlog * self._token_s

    def observe(self, num_rows: int, rounds: int, backlog: int, seconds: float) -> None:
        """Learns from the time of a proposal. Each part is corrected by its share of the expected time."""
        expected = self.seconds(num_rows, rounds, backlog)
        surprise = min(MAX_SURPRISE, seconds / expected) - 1.0
        part = self._proposal_s(num_rows, rounds) / expected
        self._scale = max(MIN_SCALE, self._scale * (1.0 + RATE * surprise * part))
        self._token_s = max(MIN_TOKEN_S, self._token_s * (1.0 + READ_RATE * surprise * (1.0 - part)))

    def _proposal_s(self, num_rows: int, rounds: int) -> float:
        return self._scale * rounds * self._table.seconds(num_rows)
