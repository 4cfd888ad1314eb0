"""Drafts for rows where drafting is not expected to pay, within a share of the time, to notice when it would pay."""

from collections.abc import Sequence

from penstock.models.speculative.draft_cost import DraftCost
from penstock.models.speculative.draft_rows import TRIAL, DraftedRows, RowRecord
from penstock.models.speculative.drafter import Drafter, Wanted

PROBE_SHARE = 0.01
"""The share of the time that probes may take: half of it to propose drafts, half to verify them."""
MAX_SAVED = 32
"""The most steps whose time may be saved up for proposals."""
MIN_VERIFY_SHARE = 0.05
"""The least that verifying a probe's draft is assumed to cost, as a share of the step, since little may be known."""


class Prober:
    """Chooses the rows to draft for although that is not expected to pay, and counts the seconds that it may take."""

    def __init__(self, drafter: Drafter, rows: DraftedRows, cost: DraftCost) -> None:
        self._drafter = drafter
        self._rows = rows
        self._cost = cost
        self._propose_s = self._verify_s = 0.0
        """The seconds that are saved up."""
        self._step = 0
        """The last step that earned time."""

    def earn(self, step: int, step_s: float) -> None:
        """Earns the share of all steps since the last call, each of ``step_s`` seconds."""
        earned_s = PROBE_SHARE / 2 * step_s * (step - self._step)
        self._step = step
        self._propose_s = min(self._propose_s + earned_s, MAX_SAVED * step_s)
        self._verify_s = min(self._verify_s + earned_s, step_s)

    def spend(self, seconds: float) -> None:
        """Takes the time of proposals, or of reading hidden states, from the savings. They may become negative."""
        self._propose_s -= seconds

    def wait_s(self, fence_s: float) -> float:
        """Returns how long steps must go on until the savings suffice for a probe. Not positive if they do now.
        ``fence_s`` is the time that the first proposal of a step costs besides its own."""
        num_proposals = TRIAL if self._drafter.feature_layers and not self._rows.num_followed else 1
        return (fence_s + num_proposals * self._cost.seconds(1) - self._propose_s) * 2 / PROBE_SHARE

    def may_start_trial(self, fence_s: float = 0.0) -> bool:
        """Whether the drafter may follow one more row that does not pay."""
        return not self._rows.num_on_trial and self._propose_s - fence_s >= TRIAL * self._cost.seconds(1)

    def choose(self, others: list[Wanted], fence_s: float, step_s: float) -> list[Wanted]:
        """Returns the rows whose proposals the savings can pay for. The row whose last probe is the oldest comes first.
        More than one row is chosen only within the time of a step. A trial that has begun goes on whatever is left."""
        spare_s, spent_s = self._propose_s - fence_s, 0.0
        chosen: list[Wanted] = []
        for row, most in sorted(others, key=lambda wanted: self._rows[wanted.row].proposed_at):
            record = self._rows[row]
            if self._drafter.feature_layers and not record.is_followed:
                if self.may_start_trial(fence_s):
                    self._rows.begin_trial(row, record)
                continue
            proposal_s = self._cost.seconds(1, 1, self._drafter.backlog(row))
            if record.trials_left or spent_s + proposal_s <= (min(spare_s, step_s) if chosen else spare_s):
                spent_s += proposal_s
                record.proposed_at = self._step
                chosen.append(Wanted(row, 1 if self._drafter.by_rounds else most))
        self._propose_s -= fence_s if chosen else 0.0
        return chosen

    def add_draft(
        self, records: Sequence[RowRecord], acceptance: list[list[float]], counts: list[int], seconds: list[float]
    ) -> None:
        """Adds one draft to ``counts`` that is not expected to pay, if the savings suffice to verify it. It goes to the
        row that has waited the longest for one. ``seconds`` holds the time of the step by its number of drafts."""
        total = sum(counts)
        if total + 1 >= len(seconds):
            return
        verify_s = max(seconds[total + 1] - seconds[total], MIN_VERIFY_SHARE * seconds[0])
        untried = [at for at, row in enumerate(acceptance) if row and not counts[at]]
        if untried and verify_s <= self._verify_s:
            at = min(untried, key=lambda at: records[at].probed_at)
            counts[at] = 1
            records[at].probed_at = self._step
            self._verify_s -= verify_s
