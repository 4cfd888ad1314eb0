"""Decides for each step which rows get drafts, and how many. Drafts never change the output, only its speed."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from penstock.models.batch.batch import Batch, FeatureLines
from penstock.models.batch.rows import Row, RowTable
from penstock.models.speculative.acceptance import AcceptanceEstimate
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_cost import PROPOSAL_S, DraftCost
from penstock.models.speculative.draft_lengths import choose_lengths, choose_rounds
from penstock.models.speculative.draft_rows import NOTHING, Drafted, DraftedRows, RowRecord, Tested
from penstock.models.speculative.drafter import NO_PROPOSAL, Drafter, Proposal, Wanted, valid_part
from penstock.models.speculative.observations import StepObservations
from penstock.models.speculative.prediction import Predictions
from penstock.models.speculative.probing import Prober
from penstock.scheduler.plan import RowResult, StepPlan
from penstock.scheduler.worker_config import MAX_PREDICTED_DRAFTS

PROPOSE_MARGIN = 2.0
"""How many times its cost a proposal must gain, since gains are estimates."""
PATIENCE = 20
"""The initial worth of a row, in proposals: a row that gains nothing is left after about ten."""
PLAIN_EVERY, PLAIN_OFTEN = 128, 16
"""One in this many steps has no drafts, so that their cost stays known. Where drafts gain little, plain steps are
frequent, since their cost must be known well."""
NUM_PLAIN_AHEAD = 2
"""The number of plain steps in a row if the backend runs ahead: the first one still waits for the drafts before it."""
LARGE_GAIN = 1.5
"""The ratio of token rates from which drafts gain much."""
SKIP_S, MAX_SKIP_S = 0.005, 0.1
"""If no row pays, a step is examined only this often, since that takes 25 us; and up to the maximum later if no probe
could be paid for sooner."""
WORTH_RATE, TYPICAL_RATE, USUAL_RATE = 0.2, 0.02, 0.05
"""The weights of a new observation in the moving averages."""
OBSERVE_EVERY = 16
"""While nothing is drafted, one step in this many is observed."""
USUAL = 0.9
"""The confidence assumed of a drafter before its first proposal: high, so that it makes one."""


class SpeculationController:
    """Chooses for each step the rows that a drafter proposes for, and how many of its drafts are computed.

    It maximises the expected tokens per second: ``choose_lengths`` decides how many drafts are computed, and before
    that, ``choose_rounds`` how many are proposed if each takes time. A row pays if drafting for it has gained time on
    average: the time of a step that its drafts are expected to save, less the time to compute and to propose them. The
    other rows are probed, for a small share of the time (``Prober``). So drafting never loses much more than that
    share, and the controller notices when drafting begins to pay. A drafter that reads hidden states follows the rows
    that pay, and one of the others at a time, for the same share.

    One thread calls ``add_row``, ``drop_row`` and ``propose``; another may call ``read`` and ``observe``.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        costs: StepCost,
        runs_ahead: bool,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_repetition: bool = False,
    ) -> None:
        """``max_drafts`` limits the drafter's drafts for a row; if it is 0, only rows with predictions have drafts.
        ``runs_ahead`` is the backend's. ``clock`` returns seconds. ``on_repetition``: the drafter only proposes for the
        rows that a plan calls repeating."""
        self._drafter = drafter
        self._predictions = Predictions()
        self._max_drafts = max_drafts
        self._costs = costs
        self._draft_cost = DraftCost(costs.most)
        self._runs_ahead = runs_ahead
        self._clock = clock
        self._on_repetition = on_repetition
        self._repeating: set[Row] = set()
        """The rows that the current plan calls repeating."""
        self._greedy, self._drawn = AcceptanceEstimate(), AcceptanceEstimate()
        """For rows at temperature 0, and for others: a draft is more often the likeliest token than a drawn one."""
        self._usual = [USUAL] * max_drafts
        """The average confidence by a draft's position."""
        self._rows = DraftedRows(drafter)
        self._prober = Prober(drafter, self._rows, self._draft_cost)
        self._observations = StepObservations(self._rows, costs, self._prober)
        self._typical_s = PATIENCE * self._draft_cost.seconds(1)
        """The initial ``worth_s`` of a row."""
        self._rounds = max_drafts
        """The number of rounds chosen last."""
        self._plain_every = PLAIN_OFTEN
        self._num_plain = NUM_PLAIN_AHEAD if runs_ahead else 1
        self._step = 0
        self._skip_until = 0.0
        """If no row pays, steps before this time are skipped."""
        self._is_skipped = False
        """Whether the current step is."""
        self._num_skipped = 0

    def attach(self, table: RowTable) -> None:
        self._drafter.attach(table)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose input the drafter reads from the next batch."""
        return self._drafter.feature_layers if self._rows.num_followed else ()

    def read(self, batch: Batch, features: FeatureLines) -> None:
        began = self._clock()
        self._drafter.read(batch, features)
        self._observations.reading_s = self._clock() - began

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        self._drafter.reset_blocks(block_ids)

    def measure_steps(self, run: Callable[[int], None], most: int) -> None:
        """Measures the time of steps. ``run`` computes a step of the given number of tokens, at most ``most``."""
        if self._max_drafts and not self._on_repetition:
            self._costs.measure(run, most, self._clock)
        self._observations.clear_steps()  # the measured steps were observed as well

    def learn_steps(self, seconds: Mapping[int, float]) -> None:
        """Adopts the measured times of steps, by their number of decoding rows, if there are no others."""
        if not self._max_drafts or self._on_repetition:
            self._costs.know(seconds)

    @property
    def measures_proposals(self) -> bool:
        """Whether the time of proposals must be measured."""
        return self._drafter.by_rounds

    def measure_proposals(self, rows: Sequence[Row]) -> None:
        """Measures the time of proposals for these rows, which the model has computed and no request uses."""
        wanted = [Wanted(row, 1) for row in rows]
        self._draft_cost.measure(lambda size: self._drafter.propose(wanted[:size]), len(rows), self._clock)
        self._typical_s = PATIENCE * self._draft_cost.seconds(1)
        self._observations.clear_steps()

    def add_row(self, row: Row) -> None:
        """Adds a row, if it may have drafts."""
        most = min(row.max_drafts, MAX_PREDICTED_DRAFTS if row.prediction else self._max_drafts)
        if most and row.pooled is None and (row.prediction or not self._on_repetition):
            record = RowRecord(most, self._drawn if row.sampling.temperature else self._greedy, self._typical_s)
            if row.prediction:
                record.worth_s = self._expected_worth_s()
            self._rows.add_row(row, record, self._prober.may_start_trial())

    def _expected_worth_s(self) -> float:
        """Returns the initial worth of a row whose drafts are expected to pay."""
        return max(PATIENCE * PROPOSAL_S, self._costs.seconds(1))

    def drop_row(self, row: Row) -> None:
        self._rows.drop_row(row)
        self._predictions.drop_row(row)

    def propose(
        self,
        plan: StepPlan,
        table: RowTable,
        wait_for_tokens: Callable[[], object],
        forced: Mapping[int, Sequence[int]],
    ) -> Drafted:
        """Returns the drafts of a step, within the plan's limits.

        Calls ``wait_for_tokens`` only if there are rows to draft for: it waits until the tokens of the previous step
        are in the rows. ``forced`` has the drafts that are known to be right, by row number. They are part of the
        result, and their rows get no other drafts.
        """
        if forced:
            plan = msgspec.structs.replace(plan, max_drafts=plan.max_drafts - sum(map(len, forced.values())))
        if self._on_repetition:
            self._follow_repetition({table[number] for number in plan.repeating})
        if not self._rows or (self._on_repetition and plan.max_drafts <= 0):
            self._is_skipped = True
            return Drafted(forced) if forced else NOTHING
        began = self._clock()
        wanted = self._choose(plan, table, forced)
        choosing_s = self._clock() - began
        if not wanted:
            return Drafted(forced) if forced else NOTHING
        wait_for_tokens()
        drafted = self._draft(wanted, plan, choosing_s)
        return replace(drafted, drafts={**drafted.drafts, **forced}) if forced else drafted

    def observe(self, drafted: Drafted, batch: Batch, rows: list[RowResult], seconds: float, is_fenced: bool) -> None:
        """Records a step of ``seconds``, with drafting. ``is_fenced``: it began after the previous step had ended."""
        if drafted.tested:
            self._observations.add_drafts(drafted, rows)
        elif self._is_skipped:
            # Some are still observed, since the time of a step with drafts must be compared with that of plain ones.
            self._num_skipped += 1
            if self._num_skipped % OBSERVE_EVERY:
                return
        self._observations.add_step(drafted, batch, seconds, is_fenced)

    # ------------------------------------------------------------------------------------------------ which rows

    def _follow_repetition(self, repeating: set[Row]) -> None:
        """Gives each row whose text has begun to repeat itself a new record. With its old one it might never be tried
        again."""
        for row in repeating - self._repeating:
            if not row.prediction:
                most = min(row.max_drafts, self._max_drafts)
                self._rows.add_row(row, RowRecord(most, AcceptanceEstimate(), self._expected_worth_s()), may_try=False)
        self._repeating = repeating

    def _choose(self, plan: StepPlan, table: RowTable, forced: Mapping[int, Sequence[int]]) -> list[Wanted]:
        """Returns the rows to draft for in this step."""
        now = self._clock()
        self._step += 1
        is_busy = self._rows.num_paying or self._rows.num_on_trial
        self._is_skipped = not is_busy and now < self._skip_until
        if self._is_skipped:
            return []
        self._skip_until = now + SKIP_S
        self._observations.learn()
        if plan.max_drafts <= 0 or 0 < self._step % self._plain_every <= self._num_plain:
            return []
        num_tokens = _num_tokens(plan)
        step_s = self._costs.seconds(num_tokens, not self._runs_ahead)
        fence_s = max(0.0, self._costs.seconds(num_tokens) - step_s) if self._runs_ahead else 0.0
        is_busy = self._rows.num_paying or self._rows.num_on_trial
        self._prober.earn(self._step, step_s)
        wait_s = self._prober.wait_s(fence_s)
        if not is_busy and wait_s > 0.0:
            self._skip_until += min(MAX_SKIP_S, wait_s)
            return []
        paying, others = self._candidates(plan, table, forced)
        if paying and sum(self._rows[row].worth_s for row, _ in paying) < fence_s:
            paying, others = [], paying + others
        return paying + self._prober.choose(others, 0.0 if paying else fence_s, step_s)

    def _candidates(
        self, plan: StepPlan, table: RowTable, forced: Mapping[int, Sequence[int]]
    ) -> tuple[list[Wanted], list[Wanted]]:
        """Returns the rows that pay, or are new; and the others."""
        paying: list[Wanted] = []
        others: list[Wanted] = []
        for decode in plan.decodes:
            row = table[decode.row]
            record = self._rows.get(row)
            if record is None or decode.row in forced or not (row.prediction or self._may_ask(row)):
                continue
            max_drafts = min(decode.max_tokens - 1, plan.max_drafts, record.max_drafts)
            if max_drafts > 0 and (row.prediction or self._drafter.is_ready(row) or not record.is_followed):
                (paying if record.worth_s >= 0.0 else others).append(Wanted(row, max_drafts))
        return paying, others

    # ------------------------------------------------------------------------------------------- how many drafts

    def _draft(self, wanted: list[Wanted], plan: StepPlan, choosing_s: float) -> Drafted:
        """Lets the drafter propose, and chooses how many of its drafts the step computes."""
        began = self._clock()
        predicted = self._predictions.propose(wanted)
        asked = self._to_ask(wanted, predicted, plan)
        backlog = sum(self._drafter.backlog(row) for row, _ in asked)
        proposed = dict(zip((row for row, _ in asked), self._drafter.propose(asked), strict=True)) if asked else {}
        if self._drafter.by_rounds:
            self._learn_usual(list(proposed.values()))
        wanted = [one for one in wanted if one.row in proposed or one.row.prediction]
        if not wanted:
            return NOTHING
        records = [self._rows[row] for row, _ in wanted]
        num_others = sum(record.worth_s < 0.0 for record in records)
        proposals = [
            valid_part(one, record.better(proposed.get(one.row, NO_PROPOSAL), predicted.get(one.row, NO_PROPOSAL)))
            for one, record in zip(wanted, records, strict=True)
        ]
        counts = self._choose_counts(wanted, records, proposals, plan, asked)
        drafts, tested = {}, {}
        for (row, _), record, proposal, count in zip(wanted, records, proposals, counts, strict=True):
            if count:
                drafts[row.number] = proposal.token_ids[:count]
                tested[row.number] = Tested(record, proposal.confidences[:count], proposal.is_predicted)
        took = self._clock() - began
        self._prober.spend((took + choosing_s) * num_others / len(wanted))
        if asked:
            self._draft_cost.observe(len(asked), self._num_rounds(asked), backlog, took + choosing_s)
        return Drafted(drafts, tested, took)

    def _may_ask(self, row: Row) -> bool:
        """Whether the drafter may propose for a row."""
        return not self._on_repetition or row in self._repeating

    def _to_ask(self, wanted: list[Wanted], predicted: Mapping[Row, Proposal], plan: StepPlan) -> list[Wanted]:
        """Returns the rows for which the drafter proposes, with the maximum number of drafts for each. If each takes
        time, these are only the rows for which its drafts are expected to do better than those of their predictions."""
        most_drafts = self._max_drafts
        asked = [
            Wanted(row, min(most, most_drafts))
            for row, most in wanted
            if most_drafts and self._may_ask(row) and self._drafter.is_ready(row)
        ]
        if not self._drafter.by_rounds:
            return asked
        usual = Proposal([], self._usual)
        asked = [
            one
            for one in asked
            if one.row not in predicted or self._rows[one.row].better(usual, predicted[one.row]) is usual
        ]
        return self._shortened(asked, plan) if asked else []

    def _choose_counts(
        self,
        wanted: list[Wanted],
        records: list[RowRecord],
        proposals: list[Proposal],
        plan: StepPlan,
        asked: list[Wanted],
    ) -> list[int]:
        """Returns how many drafts of each proposal are computed, and learns what each row is worth."""
        acceptance = [
            record.acceptance_of(proposal.is_predicted).estimate(proposal.confidences[:most])
            for record, proposal, (_, most) in zip(records, proposals, wanted, strict=True)
        ]
        seconds = self._step_seconds(plan, sum(map(len, acceptance)))
        counts, token_s = choose_lengths(acceptance, len(plan.decodes), seconds)
        gains_much = token_s * len(plan.decodes) * LARGE_GAIN < seconds[0]
        self._plain_every = PLAIN_EVERY if gains_much else PLAIN_OFTEN
        each_s = (seconds[sum(counts)] - seconds[0]) / max(1, sum(counts))
        proposal_s = self._draft_cost.seconds(len(asked), self._num_rounds(asked)) / len(asked) if asked else PROPOSAL_S
        beside_s = self._observations.read_s + (1.0 if self._drafter.by_rounds else PROPOSE_MARGIN) * proposal_s
        for (row, _), record, row_acceptance, count in zip(wanted, records, acceptance, counts, strict=True):
            self._learn_worth(row, record, token_s * sum(row_acceptance[:count]) - each_s * count - beside_s)
            if row_acceptance and record.trials_left:
                self._rows.try_again(row, record)
        self._prober.add_draft(records, acceptance, counts, seconds)
        return counts

    def _shortened(self, wanted: list[Wanted], plan: StepPlan) -> list[Wanted]:
        """Returns the rows with as many drafts as are expected to pay. The rows that are probed stay as they are."""
        paying = [one for one in wanted if self._rows[one.row].worth_s >= 0.0]
        if not paying:
            return wanted
        acceptance = [self._rows[row].acceptance.estimate(self._usual[:most]) for row, most in paying]
        seconds = self._step_seconds(plan, sum(map(len, acceptance)))
        read_s, number = len(paying) * self._observations.read_s, len(paying)
        rounds = choose_rounds(
            acceptance, len(plan.decodes), seconds,
            lambda count: read_s + self._draft_cost.seconds(number, count), self._rounds,
        )  # fmt: skip
        shortened = [one for one in wanted if self._rows[one.row].worth_s < 0.0]
        for (row, most), count in zip(paying, rounds.counts, strict=True):
            if count:
                shortened.append(Wanted(row, min(most, rounds.number)))
            elif not row.prediction:
                self._rows.set_worth(row, self._rows[row], -self._draft_cost.seconds(1))
        self._rounds = max(1, rounds.number)
        self._typical_s = self._draft_cost.seconds(1) * (1.0 if rounds.number else -1.0)
        return shortened

    def _num_rounds(self, wanted: list[Wanted]) -> int:
        return max(most for _, most in wanted) if self._drafter.by_rounds else 1

    def _step_seconds(self, plan: StepPlan, most: int) -> list[float]:
        """Returns the seconds of the step with 0 drafts, 1, and so on, up to ``most``. The time of its chunks is left
        out: a token is worth the time that it takes in a step without chunks."""
        seconds = self._costs.span(_num_tokens(plan), min(most, plan.max_drafts))
        chunks = seconds[0] - self._costs.seconds(len(plan.decodes))
        return [step - chunks for step in seconds]

    # -------------------------------------------------------------------------------------------------- learning

    def _learn_usual(self, proposals: list[Proposal]) -> None:
        for proposal in proposals:
            for place, confidence in enumerate(proposal.confidences[: self._max_drafts]):
                self._usual[place] += USUAL_RATE * (confidence - self._usual[place])

    def _learn_worth(self, row: Row, record: RowRecord, gained_s: float) -> None:
        if not self._drafter.by_rounds and not row.prediction:
            self._typical_s += TYPICAL_RATE * (gained_s - self._typical_s)
        self._rows.set_worth(row, record, record.worth_s + WORTH_RATE * (gained_s - record.worth_s))


def _num_tokens(plan: StepPlan) -> int:
    """Returns the number of tokens without drafts."""
    return sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes)
