"""What rows may go on with: tokens that are computed in the hope that they will be chosen. Those that are not cost
time, and change nothing."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.models.batch.batch import Batch, FeatureLines
from penstock.models.batch.rows import Row, RowTable
from penstock.models.speculative.acceptance import AcceptanceEstimate, RowAcceptance
from penstock.models.speculative.ask_costs import DraftCost
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_lengths import choose_lengths, choose_rounds
from penstock.models.speculative.draft_rows import TRIAL, DraftedRows, RowRecord
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted, valid_part
from penstock.scheduler.plan import RowResult, StepPlan

PROBE_SHARE = 0.01
"""Of the time, that is spent on drafts that are not expected to pay: to notice when they would."""
MAX_SAVED = 32
"""Steps whose time may be saved up for that."""
MIN_TRY_SHARE = 0.05
"""What a draft that is not expected to pay is taken to cost of the step at least, since not much may be known of it."""
ASK_MARGIN = 2.0
"""What asking must gain, in what it takes: gains are guesses."""
PATIENCE = 20
"""What the first rows are taken to be worth, in askings: so they are asked for about ten times in vain."""
PLAIN_EVERY, PLAIN_OFTEN, NUM_PLAIN = 128, 16, 2
"""Of so many steps these are without drafts, so that it is known what they cost: often where drafts bring little, since
then it must be known well. Two, where a backend runs ahead: the first one after drafts waits for these, whatever
follows."""
MUCH = 1.5
"""Times as many tokens a second."""
LOOK_S, MAX_LOOK_S = 0.005, 0.1
"""Where nothing pays a step is looked at after so many seconds, since looking takes 25 us; and later where nobody could
be asked for any sooner, but not after more than this."""
WORTH_RATE, TYPICAL_RATE, READ_RATE, USUAL_RATE = 0.2, 0.02, 0.1, 0.05
USUAL = 0.9
"""A drafter's confidence, before it had any: high, so that it is asked at all."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted for a step."""

    drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By row number."""
    records: Mapping[int, tuple[RowRecord, list[float]]] = field(default_factory=dict)
    """Of the same rows, with the drafter's confidences."""
    seconds: float = 0.0
    """That it took."""


NOTHING = Drafted()


class SpeculationController:
    """Chooses for each step whom a drafter is asked for, and how many of its drafts are computed.

    That is by expected tokens a second: ``choose_lengths``, and before that ``choose_rounds`` where asking for more
    takes more. A row is asked for while that has gained time on average: the time of a step that its drafts are
    expected to save, less what they take to compute and to propose. For the others each step earns ``PROBE_SHARE`` of
    its seconds, half of it to ask for a row again, half of it to compute a draft all the same, and they are when so
    much is there as that will take. So whatever drafting is worth, it never loses much more than that share; and it
    notices when it would pay. A drafter that reads along follows the rows that pay; of the others one at a time, for
    the same share.

    One thread calls ``add_row``, ``drop_row``, ``choose`` and ``draft``; another may call ``read`` and ``observe``.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        costs: StepCost,
        runs_ahead: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_drafts`` of a row at most; ``runs_ahead``: the backend's, for which drafting means to wait; ``clock``
        tells seconds."""
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._costs = costs
        self._draft_cost = DraftCost(costs.most)
        self._runs_ahead = runs_ahead
        self._clock = clock
        self._greedy, self._drawn = AcceptanceEstimate(), AcceptanceEstimate()
        """Of rows at temperature 0, and of others: drafts are the likeliest token more often than one that is drawn."""
        self._usual = [USUAL] * max_drafts
        """Confidences, by a draft's place."""
        self._rows = DraftedRows(drafter)
        self._typical_s = PATIENCE * self._draft_cost.seconds(1)
        """``worth_s`` of rows that nothing is known of."""
        self._rounds = max_drafts
        """The last number that was chosen."""
        self._read_s = 0.0
        """What reading along takes, for a row and step."""
        self._reading_s = 0.0
        """What it took in the step that ``observe`` will be told of."""
        self._to_ask_s = self._to_try_s = 0.0
        """What was earned for rows that do not pay."""
        self._plain_every = PLAIN_OFTEN
        self._num_plain = NUM_PLAIN if runs_ahead else 1
        self._step = self._looked_step = 0
        self._look_at = 0.0
        """When a step is looked at next, where nothing pays."""
        self._is_idle = False
        """Whether nobody looks at the step."""
        self._choosing_s = 0.0
        """What it took to choose for the next ``draft``."""
        self._observed: deque[tuple[Drafted, list[RowResult]]] = deque()
        self._took: deque[_Took] = deque()

    def attach(self, table: RowTable) -> None:
        """Called once, before all else: all rows."""
        self._drafter.attach(table)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Before which layers the model's hidden states are wanted of the next batch."""
        return self._drafter.feature_layers if self._rows.num_followed else ()

    def read(self, batch: Batch, features: FeatureLines) -> None:
        """The hidden states that are wanted of a batch."""
        began = self._clock()
        self._drafter.read(batch, features)
        self._reading_s = self._clock() - began

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks have another content than they had."""
        self._drafter.reset_blocks(block_ids)

    def measure(self, run: Callable[[int], None], most: int) -> None:
        """Finds out what steps cost: ``run`` computes one of so many tokens, up to ``most``."""
        self._costs.measure(run, most, self._clock)
        self._took.clear()  # of these very steps

    def measure_asking(self, rows: Sequence[Row]) -> None:
        """Finds out what asking costs, by asking for a draft of these, which the model has computed; nobody has it."""
        if self._drafter.by_rounds:
            self._draft_cost.measure(lambda size: self._ask_each(rows[:size]), len(rows), self._clock)
            self._typical_s = PATIENCE * self._draft_cost.seconds(1)
        self._took.clear()

    def _ask_each(self, rows: Sequence[Row]) -> None:
        self._drafter.propose([Wanted(row, 1) for row in rows])

    def add_row(self, row: Row) -> None:
        """A row begins."""
        if row.max_drafts and row.pooled is None:
            most = min(row.max_drafts, self._max_drafts)
            acceptance = RowAcceptance(most, self._drawn if row.sampling.temperature else self._greedy)
            record = RowRecord(most, acceptance, self._typical_s)
            self._rows.add_row(row, record, self._may_try(self._to_ask_s))

    def drop_row(self, row: Row) -> None:
        """A row is dropped."""
        self._rows.drop_row(row)

    def choose(self, table: RowTable, plan: StepPlan) -> list[Wanted]:
        """Rows that the plan continues, for which ``draft`` is to be called once their tokens are known; none: nothing
        is drafted."""
        began = self._clock()
        self._step += 1
        is_busy = self._rows.num_paying or self._rows.num_on_trial
        self._is_idle = not is_busy and began < self._look_at
        if self._is_idle:
            return []
        self._look_at = began + LOOK_S
        self._take_in()
        if not plan.max_drafts or not self._rows or 0 < self._step % self._plain_every <= self._num_plain:
            return []
        wanted = self._wanted(table, plan)
        self._choosing_s = self._clock() - began
        return wanted

    def _wanted(self, table: RowTable, plan: StepPlan) -> list[Wanted]:
        num_tokens = _num_tokens(plan)
        free = self._costs.seconds(num_tokens, not self._runs_ahead)
        fence_s = max(0.0, self._costs.seconds(num_tokens) - free) if self._runs_ahead else 0.0
        is_busy = self._rows.num_paying or self._rows.num_on_trial
        earned_s = PROBE_SHARE / 2 * free * (self._step - self._looked_step)
        self._looked_step = self._step
        self._to_ask_s = min(self._to_ask_s + earned_s, MAX_SAVED * free)
        self._to_try_s = min(self._to_try_s + earned_s, free)
        lacking_s = fence_s + self._least_s() - self._to_ask_s
        if not is_busy and lacking_s > 0.0:
            self._look_at += min(MAX_LOOK_S, lacking_s * 2 / PROBE_SHARE)
            return []
        paying, others = self._candidates(table, plan)
        if paying and sum(self._rows[row].worth_s for row, _ in paying) < fence_s:
            paying, others = [], paying + others
        return paying + self._affordable(others, 0.0 if paying else fence_s, free)

    def draft(self, wanted: list[Wanted], plan: StepPlan) -> Drafted:
        """Drafts for rows that were chosen, within the plan's bounds. Their tokens must be known."""
        began = self._clock()
        choosing_s, self._choosing_s = self._choosing_s, 0.0
        if self._drafter.by_rounds:
            wanted = self._shortened(wanted, plan)
            if not wanted:
                return NOTHING
        backlog = sum(self._drafter.backlog(row) for row, _ in wanted)
        records = [self._rows[row] for row, _ in wanted]
        num_others = sum(record.worth_s < 0.0 for record in records)
        proposed = self._drafter.propose(wanted)
        proposals = [valid_part(one, proposal) for one, proposal in zip(wanted, proposed, strict=True)]
        acceptance = [
            record.acceptance.estimate(proposal.confidences[:most])
            for record, proposal, (_, most) in zip(records, proposals, wanted, strict=True)
        ]
        seconds = self._step_seconds(plan, sum(map(len, acceptance)))
        counts, token_s = choose_lengths(acceptance, len(plan.decodes), seconds)
        does_much = token_s * len(plan.decodes) * MUCH < seconds[0]
        self._plain_every = PLAIN_EVERY if does_much else PLAIN_OFTEN
        each_s = (seconds[sum(counts)] - seconds[0]) / max(1, sum(counts))
        beside_s = self._read_s + (1.0 if self._drafter.by_rounds else ASK_MARGIN) * self._ask_s(wanted)
        for (row, _), record, row_acceptance, count in zip(wanted, records, acceptance, counts, strict=True):
            self._learn_worth(row, record, token_s * sum(row_acceptance[:count]) - each_s * count - beside_s)
            if row_acceptance and record.trials_left:
                self._rows.try_again(row, record)
        self._try_one(records, acceptance, counts, seconds)
        given = [
            (row.number, proposal.token_ids[:count], (record, proposal.confidences[:count]))
            for (row, _), record, proposal, count in zip(wanted, records, proposals, counts, strict=True)
            if count
        ]
        if self._drafter.by_rounds:
            self._learn_usual(proposals)
        took = self._clock() - began
        self._to_ask_s -= (took + choosing_s) * num_others / len(wanted)
        self._draft_cost.observe(len(wanted), self._num_rounds(wanted), backlog, took + choosing_s)
        return Drafted(
            {number: drafts for number, drafts, _ in given}, {number: record for number, _, record in given}, took
        )

    def observe(self, drafted: Drafted, batch: Batch, rows: list[RowResult], seconds: float, is_fenced: bool) -> None:
        """What came of a step: ``seconds`` is what it took, drafting included; ``is_fenced``: it began when the last
        one was over."""
        if drafted.records:
            self._observed.append((drafted, rows))
        elif self._is_idle:
            return
        reading_s, self._reading_s = self._reading_s, 0.0
        has_chunks = len(batch.sampled) != len(batch.token_ids)  # what was measured had none
        self._took.append(
            _Took(len(batch.token_ids), seconds - drafted.seconds - reading_s, reading_s, is_fenced, has_chunks)
        )

    def _take_in(self) -> None:
        """Learns from what was observed."""
        while self._took:
            took = self._took.popleft()
            if self._rows.num_followed:
                self._to_ask_s -= took.reading_s * self._rows.num_on_trial / self._rows.num_followed
            if took.has_chunks:
                continue
            if took.seconds > 0.0:
                self._costs.observe(took.num_tokens, took.seconds, took.is_fenced)
            if self._rows.num_followed:
                self._read_s += READ_RATE * (took.reading_s / self._rows.num_followed - self._read_s)
        while self._observed:
            drafted, rows = self._observed.popleft()
            for result in rows:
                if result.row in drafted.records and result.token_ids:  # else nothing was chosen
                    record, confidences = drafted.records[result.row]
                    num_right = len(result.token_ids) - 1
                    record.acceptance.learn(confidences, num_right)
                    if num_right:
                        record.tried_at = 0  # whoever was right is worth another trial, before all others

    def _candidates(self, table: RowTable, plan: StepPlan) -> tuple[list[Wanted], list[Wanted]]:
        """Rows that have paid so far, or of which nothing is known; and the others."""
        paying: list[Wanted] = []
        others: list[Wanted] = []
        for decode in plan.decodes:
            row = table[decode.row]
            record = self._rows.get(row)
            if record is None:
                continue
            max_drafts = min(decode.max_tokens - 1, plan.max_drafts, record.max_drafts)
            if max_drafts > 0 and (self._drafter.is_ready(row) or not record.is_followed):
                (paying if record.worth_s >= 0.0 else others).append(Wanted(row, max_drafts))
        return paying, others

    def _affordable(self, others: list[Wanted], fence_s: float, step_s: float) -> list[Wanted]:
        """Those for which a drafter can be asked with what was earned, who have waited the longest; more than one only
        as far as a step's time goes. A trial that has begun is ended whatever is left."""
        spare_s, spent_s = self._to_ask_s - fence_s, 0.0
        chosen: list[Wanted] = []
        for row, most in sorted(others, key=self._asked_at):
            record = self._rows[row]
            if self._drafter.feature_layers and not record.is_followed:
                if self._may_try(spare_s):
                    self._rows.begin_trial(row, record)
                continue
            ask_s = self._draft_cost.seconds(1, 1, self._drafter.backlog(row))
            if record.trials_left or spent_s + ask_s <= (min(spare_s, step_s) if chosen else spare_s):
                spent_s += ask_s
                record.asked_at = self._step
                chosen.append(Wanted(row, 1 if self._drafter.by_rounds else most))
        self._to_ask_s -= fence_s if chosen else 0.0
        return chosen

    def _least_s(self) -> float:
        """What a row takes at least to be asked for, or to be on trial, where none is."""
        askings = TRIAL if self._drafter.feature_layers and not self._rows.num_followed else 1
        return askings * self._draft_cost.seconds(1)

    def _may_try(self, spare_s: float) -> bool:
        """Whether a row that does not pay may be on trial."""
        return not self._rows.num_on_trial and spare_s >= TRIAL * self._draft_cost.seconds(1)

    def _asked_at(self, wanted: Wanted) -> int:
        return self._rows[wanted.row].asked_at

    def _shortened(self, wanted: list[Wanted], plan: StepPlan) -> list[Wanted]:
        """As many drafts of each row as are expected to pay. Rows that were chosen though they do not pay stay."""
        paying = [one for one in wanted if self._rows[one.row].worth_s >= 0.0]
        if not paying:
            return wanted
        acceptance = [self._rows[row].acceptance.estimate(self._usual[:most]) for row, most in paying]
        seconds = self._step_seconds(plan, sum(map(len, acceptance)))
        read_s, number = len(paying) * self._read_s, len(paying)
        rounds = choose_rounds(
            acceptance, len(plan.decodes), seconds,
            lambda count: read_s + self._draft_cost.seconds(number, count), self._rounds,
        )  # fmt: skip
        shortened = [one for one in wanted if self._rows[one.row].worth_s < 0.0]
        for (row, most), count in zip(paying, rounds.counts, strict=True):
            if count:
                shortened.append(Wanted(row, min(most, rounds.number)))
            else:
                self._rows.set_worth(row, self._rows[row], -self._draft_cost.seconds(1))
        self._rounds = max(1, rounds.number)
        self._typical_s = self._draft_cost.seconds(1) * (1.0 if rounds.number else -1.0)
        return shortened

    def _learn_usual(self, proposals: list[Proposal]) -> None:
        for proposal in proposals:
            for place, confidence in enumerate(proposal.confidences[: self._max_drafts]):
                self._usual[place] += USUAL_RATE * (confidence - self._usual[place])

    def _num_rounds(self, wanted: list[Wanted]) -> int:
        return max(most for _, most in wanted) if self._drafter.by_rounds else 1

    def _ask_s(self, wanted: list[Wanted]) -> float:
        """What it takes to ask for a row."""
        return self._draft_cost.seconds(len(wanted), self._num_rounds(wanted)) / len(wanted)

    def _step_seconds(self, plan: StepPlan, most: int) -> list[float]:
        """Of the step with 0 drafts, 1, and so on, up to ``most``; its chunks are left out, since what a token is worth
        is what it takes in a step without."""
        seconds = self._costs.span(_num_tokens(plan), min(most, plan.max_drafts))
        chunks = seconds[0] - self._costs.seconds(len(plan.decodes))
        return [step - chunks for step in seconds]

    def _learn_worth(self, row: Row, record: RowRecord, gained_s: float) -> None:
        if not self._drafter.by_rounds:
            self._typical_s += TYPICAL_RATE * (gained_s - self._typical_s)
        self._rows.set_worth(row, record, record.worth_s + WORTH_RATE * (gained_s - record.worth_s))

    def _try_one(
        self, records: list[RowRecord], acceptance: list[list[float]], counts: list[int], seconds: list[float]
    ) -> None:
        """Gives a row a draft that is not expected to pay, if there is one, and what it takes was earned: the row that
        has waited for it the longest."""
        total = sum(counts)
        if total + 1 >= len(seconds):
            return
        draft_s = max(seconds[total + 1] - seconds[total], MIN_TRY_SHARE * seconds[0])
        untried = [at for at, row in enumerate(acceptance) if row and not counts[at]]
        if untried and draft_s <= self._to_try_s:
            at = min(untried, key=lambda at: records[at].tried_at)
            counts[at] = 1
            records[at].tried_at = self._step
            self._to_try_s -= draft_s


class _Took(NamedTuple):
    """What a step took."""

    num_tokens: int
    seconds: float
    """Without drafting and reading."""
    reading_s: float
    is_fenced: bool
    has_chunks: bool


def _num_tokens(plan: StepPlan) -> int:
    """Without drafts."""
    return sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes)
