"""When the stages of a model compute, in virtual time."""

from collections.abc import Sequence

from penstock.scheduler.plan import Decode, StepPlan, StepResult


class StageTimes:
    """One or more stages, each of which computes its share of every step, in order, and passes it on to the next.

    Two steps in three stages; the second one waits for no row of the first:

        stage 1   |--1--|--2--|
        stage 2         |--1--|--2--|
        stage 3               |--1--|--2--|
    """

    def __init__(self, num_stages: int, hop_s: float = 0.0) -> None:
        """``hop_s`` is the time from one stage to the next, and from the last one back to the first."""
        self._share = 1 / num_stages
        self._hop_s = hop_s if num_stages > 1 else 0.0
        self._free_at = [0.0] * num_stages
        self._answered_at = 0.0
        self._token_at: dict[int, float] = {}
        """When each row's last token is back at the first stage, if there are several."""
        self.busy_s = 0.0
        """The time for which stages computed, summed."""

    def run(self, plan: StepPlan, result: StepResult, ready_at: float) -> float:
        """Returns the time at which a step ends that the first stage has from ``ready_at`` on. Sets the result's
        ``computed_us`` as a worker does: the time since the step began, or since the last result."""
        seconds = result.computed_us * 1e-6
        self.busy_s += seconds
        began = max(ready_at, self._free_at[0], self._last_token_at(plan.decodes))
        end = began
        for stage, free_at in enumerate(self._free_at):
            end = max(end + (self._hop_s if stage else 0.0), free_at) + seconds * self._share
            self._free_at[stage] = end
        end += self._hop_s
        if len(self._free_at) > 1:
            for row in result.rows:
                if row.token_ids:
                    self._token_at[row.row] = end
        result.computed_us = max(1, round((end - max(began, self._answered_at)) * 1e6))
        self._answered_at = end
        return end

    def _last_token_at(self, decodes: Sequence[Decode]) -> float:
        """Returns when the first stage has the tokens that these rows continue."""
        if len(self._free_at) == 1:
            return 0.0
        return max((self._token_at[decode.row] for decode in decodes), default=0.0)
