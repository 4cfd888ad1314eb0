"""What rows may go on with: tokens that are computed in the hope that they will be chosen. Those that are not cost
time, and change nothing."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch import Batch
from penstock.models.draft_chances import DraftChances, RowChances
from penstock.models.draft_lengths import choose_lengths
from penstock.models.rows import Row, RowTable
from penstock.models.step_costs import StepCosts
from penstock.scheduler.plan import RowResult, StepPlan

PROBE_SHARE = 0.01
"""Of the time, that is spent on drafts that are not expected to pay: to notice when they would."""
MIN_TRY_SHARE = 0.05
"""What a draft that is not expected to pay is taken to cost of the step at least, since not much may be known of it."""
ASK_S = 1e-5
"""What the first asking of a drafter is expected to take, for a row."""
ASK_RATE = 0.1
MIN_ASK_S = 1e-6
ASK_MARGIN = 2.0
"""What asking must gain, in what it takes: gains are guesses."""
MAX_ASK_SURPRISE = 4.0
"""A long prompt that is looked at for the first time tells nothing of later steps."""
PATIENCE = 20
"""What the first rows are taken to be worth, in askings: so they are asked for about ten times in vain."""
PLAIN_EVERY, NUM_PLAIN = 128, 2
"""Of so many steps these are without drafts, so that it is known what they cost. Two: the first one after drafts waits
for these, whatever follows."""
WORTH_RATE, TYPICAL_RATE = 0.2, 0.02


class Wanted(NamedTuple):
    """A row that may be drafted for."""

    row: Row
    max_drafts: int
    """At least 1."""


class Proposal(NamedTuple):
    """What may follow a row's history."""

    token_ids: list[int]
    confidences: list[float]
    """For each of them from 0 to 1 how likely it is right, if those before it are; right in its order rather than in
    its amount, since what comes of drafts corrects it."""


NO_PROPOSAL = Proposal([], [])


class Drafter(ABC):
    """Proposes drafts. Rows' histories are known whenever it is asked; it finds out itself what is new in them."""

    feature_layers: tuple[int, ...] = ()
    """Before which layers it wants the model's hidden states of all tokens."""

    def read(self, batch: Batch, features: NDArray[np.float32]) -> None:  # noqa: B027
        """The hidden states of a batch, (T, feature layers, hidden), after what it chose was added to the rows. Who
        wants none is given none."""

    def attach(self, table: RowTable) -> None:  # noqa: B027
        """Called once, before all else: all rows. Who drafts from text alone needs no more than it is given later."""

    def renew(self, block_ids: Sequence[int]) -> None:  # noqa: B027
        """Blocks have another content than they had. Who keeps nothing by blocks need not know."""

    @abstractmethod
    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """One for each row; none of its tokens is fine."""

    @abstractmethod
    def forget(self, row: Row) -> None:
        """The row is dropped; what it output may help others of its tenant. Its last tokens may be ``UNKNOWN``."""


class RowRecord:
    """What is remembered of a row that may be drafted for."""

    __slots__ = ("chances", "max_drafts", "tried_at", "worth_s")

    def __init__(self, max_drafts: int, worth_s: float) -> None:
        self.max_drafts = max_drafts
        self.chances = RowChances(max_drafts)
        self.worth_s = worth_s
        """Seconds that a step gains by asking for it: of late, on average."""
        self.tried_at = 0
        """The last step in which it was asked for, or had a draft, though that did not pay."""


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


class Drafting:
    """Chooses for each step whom a drafter is asked for, and how many of its drafts are computed.

    That is by expected tokens a second: ``choose_lengths``. A row is asked for while that has gained time on average:
    the time of a step that its drafts are expected to save, less what they take to compute and to propose. For the
    others each step earns ``PROBE_SHARE`` of its seconds, half of it to ask for a row again, half of it to compute a
    draft all the same, and they are when so much is there as that will take. So whatever drafting is worth, it never
    loses much more than that share; and it notices when it would pay.

    ``add``, ``forget``, ``choose`` and ``draft`` are called by one thread, ``observe`` perhaps by another.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        costs: StepCosts,
        runs_ahead: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_drafts`` of a row at most; ``runs_ahead``: the backend's, for which drafting means to wait; ``clock``
        tells seconds."""
        self._drafter = drafter
        self._max_drafts = max_drafts
        self._costs = costs
        self._runs_ahead = runs_ahead
        self._clock = clock
        self._chances = DraftChances()
        self._records: dict[Row, RowRecord] = {}
        self._num_paying = 0
        """Rows whose ``worth_s`` is not negative."""
        self._typical_s = PATIENCE * ASK_S
        """``worth_s`` of rows that nothing is known of."""
        self._ask_s = ASK_S
        """What asking takes, for a row."""
        self._to_ask_s = self._to_try_s = 0.0
        """What was earned for rows that do not pay."""
        self._step = 0
        self._observed: deque[tuple[Drafted, list[RowResult]]] = deque()
        self._took: deque[tuple[int, float, bool]] = deque()

    def attach(self, table: RowTable) -> None:
        """Called once, before all else: all rows."""
        self._drafter.attach(table)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Before which layers the model's hidden states are wanted."""
        return self._drafter.feature_layers

    def read(self, batch: Batch, features: NDArray[np.float32]) -> None:
        """The hidden states that are wanted of a batch."""
        self._drafter.read(batch, features)

    def renew(self, block_ids: Sequence[int]) -> None:
        """Blocks have another content than they had."""
        self._drafter.renew(block_ids)

    def measure(self, run: Callable[[int], None], most: int) -> None:
        """Finds out what steps cost: ``run`` computes one of so many tokens, up to ``most``."""
        self._costs.measure(run, most, self._clock)
        self._took.clear()  # of these very steps

    def add(self, row: Row) -> None:
        """A row begins."""
        if row.max_drafts and row.pooled is None:
            self._records[row] = RowRecord(min(row.max_drafts, self._max_drafts), self._typical_s)
            self._num_paying += self._typical_s >= 0.0

    def forget(self, row: Row) -> None:
        """A row is dropped."""
        record = self._records.pop(row, None)
        if record is not None:
            self._num_paying -= record.worth_s >= 0.0
            self._drafter.forget(row)

    def choose(self, table: RowTable, plan: StepPlan) -> list[Wanted]:
        """Rows that the plan continues, for which ``draft`` is to be called once their tokens are known; none: nothing
        is drafted."""
        self._take_in()
        self._step += 1
        if not plan.max_drafts or not self._records or self._step % PLAIN_EVERY < NUM_PLAIN:
            return []
        free, fenced = (self._costs.seconds(_num_tokens(plan), is_fenced) for is_fenced in (not self._runs_ahead, True))
        fence_s = max(0.0, fenced - free)
        self._to_ask_s = min(self._to_ask_s + PROBE_SHARE / 2 * free, free)
        self._to_try_s = min(self._to_try_s + PROBE_SHARE / 2 * free, free)
        if not self._num_paying and self._to_ask_s < fence_s + self._ask_s:
            return []
        paying, others = self._candidates(table, plan)
        if paying and sum(self._records[row].worth_s for row, _ in paying) < fence_s:
            paying, others = [], paying + others
        spare_s = self._to_ask_s - (0.0 if paying else fence_s)
        others = sorted(others, key=self._tried_at)[: max(0, int(spare_s / self._ask_s))]
        if others:
            self._to_ask_s = spare_s - len(others) * self._ask_s
            for row, _ in others:
                self._records[row].tried_at = self._step
        return paying + others

    def draft(self, wanted: list[Wanted], plan: StepPlan) -> Drafted:
        """Drafts for rows that were chosen, within the plan's bounds. Their tokens must be known."""
        began = self._clock()
        records = [self._records[row] for row, _ in wanted]
        proposals = [_valid(one, proposal) for one, proposal in zip(wanted, self._drafter.propose(wanted), strict=True)]
        chances = [
            self._chances.estimate(record.chances, proposal.confidences[:most])
            for record, proposal, (_, most) in zip(records, proposals, wanted, strict=True)
        ]
        seconds = self._step_seconds(plan, sum(map(len, chances)))
        counts, token_s = choose_lengths(chances, len(plan.decodes), seconds)
        each_s = (seconds[sum(counts)] - seconds[0]) / max(1, sum(counts))
        for record, row_chances, count in zip(records, chances, counts, strict=True):
            self._learn_worth(record, token_s * sum(row_chances[:count]) - each_s * count - ASK_MARGIN * self._ask_s)
        self._try_one(records, chances, counts, seconds)
        given = [
            (row.number, proposal.token_ids[:count], (record, proposal.confidences[:count]))
            for (row, _), record, proposal, count in zip(wanted, records, proposals, counts, strict=True)
            if count
        ]
        took = self._clock() - began
        self._ask_s *= 1.0 + ASK_RATE * (min(MAX_ASK_SURPRISE, took / len(wanted) / self._ask_s) - 1.0)
        self._ask_s = max(self._ask_s, MIN_ASK_S)
        return Drafted(
            {number: drafts for number, drafts, _ in given}, {number: record for number, _, record in given}, took
        )

    def observe(self, drafted: Drafted, batch: Batch, rows: list[RowResult], seconds: float, is_fenced: bool) -> None:
        """What came of a step: ``seconds`` is what it took, drafting included; ``is_fenced``: it began when the last
        one was over."""
        if drafted.records:
            self._observed.append((drafted, rows))
        if len(batch.lines) == len(batch.token_ids):  # what was measured had no chunks either
            self._took.append((len(batch.token_ids), seconds - drafted.seconds, is_fenced))

    def _take_in(self) -> None:
        """Learns from what was observed."""
        while self._took:
            num_tokens, seconds, is_fenced = self._took.popleft()
            if seconds > 0.0:
                self._costs.observe(num_tokens, seconds, is_fenced)
        while self._observed:
            drafted, rows = self._observed.popleft()
            for result in rows:
                if result.row in drafted.records:
                    record, confidences = drafted.records[result.row]
                    self._chances.learn(record.chances, confidences, len(result.token_ids) - 1)

    def _candidates(self, table: RowTable, plan: StepPlan) -> tuple[list[Wanted], list[Wanted]]:
        """Rows that have paid so far, or of which nothing is known; and the others."""
        paying: list[Wanted] = []
        others: list[Wanted] = []
        for decode in plan.decodes:
            row = table[decode.row]
            record = self._records.get(row)
            if record is None:
                continue
            max_drafts = min(decode.max_tokens - 1, plan.max_drafts, record.max_drafts)
            if max_drafts > 0:
                (paying if record.worth_s >= 0.0 else others).append(Wanted(row, max_drafts))
        return paying, others

    def _tried_at(self, wanted: Wanted) -> int:
        return self._records[wanted.row].tried_at

    def _step_seconds(self, plan: StepPlan, most: int) -> list[float]:
        """Of the step with 0 drafts, 1, and so on, up to ``most``; its chunks are left out, since what a token is worth
        is what it takes in a step without."""
        seconds = self._costs.span(_num_tokens(plan), min(most, plan.max_drafts))
        chunks = seconds[0] - self._costs.seconds(len(plan.decodes))
        return [step - chunks for step in seconds]

    def _learn_worth(self, record: RowRecord, gained_s: float) -> None:
        did_pay = record.worth_s >= 0.0
        record.worth_s += WORTH_RATE * (gained_s - record.worth_s)
        self._typical_s += TYPICAL_RATE * (gained_s - self._typical_s)
        self._num_paying += (record.worth_s >= 0.0) - did_pay

    def _try_one(
        self, records: list[RowRecord], chances: list[list[float]], counts: list[int], seconds: list[float]
    ) -> None:
        """Gives a row a draft that is not expected to pay, if there is one, and what it takes was earned: the row that
        has waited for it the longest."""
        total = sum(counts)
        if total + 1 >= len(seconds):
            return
        draft_s = max(seconds[total + 1] - seconds[total], MIN_TRY_SHARE * seconds[0])
        untried = [at for at, row in enumerate(chances) if row and not counts[at]]
        if untried and draft_s <= self._to_try_s:
            at = min(untried, key=lambda at: records[at].tried_at)
            counts[at] = 1
            records[at].tried_at = self._step
            self._to_try_s -= draft_s


def _valid(wanted: Wanted, proposal: Proposal) -> Proposal:
    """As much of a proposal as the row's grammar allows."""
    row, most = wanted
    if row.matcher is None or not proposal.token_ids:
        return proposal
    count = row.matcher.num_valid(row.history, proposal.token_ids[:most])
    return Proposal(proposal.token_ids[:count], proposal.confidences[:count])


def _num_tokens(plan: StepPlan) -> int:
    """Without drafts."""
    return sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes)
