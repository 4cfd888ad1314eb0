"""What steps show about drafts: how long the steps took, and which of the drafts were right."""

from collections import deque
from typing import NamedTuple

from penstock.models.batch.batch import Batch
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_rows import Drafted, DraftedRows
from penstock.models.speculative.probing import Prober
from penstock.scheduler.plan import RowResult

MAX_STEPS = 16
"""The number of steps to learn from at a time. While nothing is drafted, older ones are discarded."""
READ_RATE = 0.1
"""The weight of a new observation in the average time of reading hidden states."""


class _StepTime(NamedTuple):
    """The time of a step."""

    num_tokens: int
    seconds: float
    """The time of the step without drafting and reading."""
    reading_s: float
    is_fenced: bool
    has_chunks: bool


class StepObservations:
    """Takes the results of steps from one thread, and lets another learn from them."""

    def __init__(self, rows: DraftedRows, costs: StepCost, prober: Prober) -> None:
        self._rows = rows
        self._costs = costs
        self._prober = prober
        self.read_s = 0.0
        """The seconds that reading hidden states takes, per row and step."""
        self.reading_s = 0.0
        """The seconds that reading took in the step that ``add_step`` is called for next."""
        self._drafted: deque[tuple[Drafted, list[RowResult]]] = deque()
        self._took: deque[_StepTime] = deque(maxlen=MAX_STEPS)

    def add_drafts(self, drafted: Drafted, rows: list[RowResult]) -> None:
        """Adds the drafts of a step, and their outcome."""
        self._drafted.append((drafted, rows))

    def add_step(self, drafted: Drafted, batch: Batch, seconds: float, is_fenced: bool) -> None:
        """Adds a step of ``seconds``, with drafting. ``is_fenced``: it began after the previous step had ended."""
        reading_s, self.reading_s = self.reading_s, 0.0
        has_chunks = len(batch.sampled) != len(batch.token_ids)
        self._took.append(
            _StepTime(len(batch.token_ids), seconds - drafted.seconds - reading_s, reading_s, is_fenced, has_chunks)
        )

    def clear_steps(self) -> None:
        """Discards the steps that were only measured."""
        self._took.clear()

    def learn(self) -> None:
        """Learns from the steps that were added since the last call."""
        while self._took:
            took = self._took.popleft()
            if self._rows.num_followed:
                self._prober.spend(took.reading_s * self._rows.num_on_trial / self._rows.num_followed)
            if took.has_chunks:  # the measured steps had none
                continue
            if took.seconds > 0.0:
                self._costs.observe(took.num_tokens, took.seconds, took.is_fenced)
            if self._rows.num_followed:
                self.read_s += READ_RATE * (took.reading_s / self._rows.num_followed - self.read_s)
        while self._drafted:
            drafted, rows = self._drafted.popleft()
            for result in rows:
                if result.row in drafted.tested and result.token_ids:  # if there are no tokens, no draft was tested
                    record, confidences, is_predicted = drafted.tested[result.row]
                    num_right = len(result.token_ids) - 1
                    record.acceptance_of(is_predicted).learn(confidences, num_right)
                    if num_right:
                        record.probed_at = 0  # the next probe is this row's
