"""Turns a plan into a result: one step of the worker. Owns the rows."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.models.backends.base import Backend
from penstock.models.batch.batch import Batch, Sampled, build_batch, join_logprobs
from penstock.models.batch.forced_tokens import with_forced_tokens
from penstock.models.batch.rows import Row, RowTable
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import SIZES
from penstock.models.speculative.draft_rows import NOTHING, Drafted
from penstock.models.speculative.drafter import Wanted
from penstock.models.structured_output.deferred_rows import without_late
from penstock.scheduler.plan import (
    NO_SLOT,
    AddedRow,
    Chunk,
    Decode,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
)
from penstock.scheduler.worker_config import MeasuredStep

if TYPE_CHECKING:  # a worker whose model has no tokenizer does not need the grammar library
    from penstock.models.structured_output.manager import StructuredOutputManager

MEASURED_CHUNKS, MEASURED_DECODES = ((0, 128), (128, 144)), (1, 16)
"""The steps measured at the start: chunks of one history, and numbers of decoding rows. They take half a second for a
model of 1.2 GB on two cores."""
LARGE_BYTES = 256 << 20
"""Multiplying by weights of this size takes a CPU so long that the cost of fresh memory does not matter."""

EMPTY_STEP_S = 0.01
"""How long a step lasts whose rows all wait for masks, so that new rows can join the next one."""
KNOWN = threading.Event()
"""Stands for a step whose tokens are known."""
KNOWN.set()
LATE = -2
"""The position of the next token of a row that sits out the step."""


class Runner:
    """Runs plans on a backend, strictly in order."""

    def __init__(
        self,
        backend: Backend,
        controller: SpeculationController | None = None,
        grammars: "StructuredOutputManager | None" = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._backend = backend
        self._controller = controller
        self._grammars = grammars
        self._matching: set[int] = set()
        """The numbers of the rows whose output must match a grammar."""
        self._clock = clock
        self._done_at = 0
        self._newest = threading.Event()
        """Set once the tokens of the newest step are known."""
        self._newest.set()
        self._has_drafts = False
        """Whether the newest step has drafts; how far it advances its rows is then unknown until it ends."""
        self.runs_ahead = backend.runs_ahead
        self._waits_for_rows = backend.runs_ahead and backend.needs_tokens
        facts = backend.facts
        self._states = backend.states if facts.num_state_slots else None
        self._rows = RowTable(
            facts.num_blocks, facts.block_size, facts.hidden_size, facts.num_state_slots, facts.num_window_groups
        )
        if controller is not None:
            controller.attach(self._rows)

    def warm(self) -> None:
        """Runs a short row, so that no request pays for what libraries set up at first use, and measures the cost of
        drafts if there are any. Leaves no trace: blocks are reset before they are used."""
        facts = self._backend.facts
        # Tables end with the context, so no position beyond it may be computed.
        end = min(facts.block_size, facts.max_model_len)
        length = max(1, end - 1)
        sampling = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, logprobs=1)
        self.run(StepPlan(0, [], [self.make_row(0, [0] * length, [0], sampling)], [], [Chunk(0, 0, length)], []))
        if length < end:
            self.run(StepPlan(0, [], [], [], [], [Decode(0, 1)]))
        self.run(StepPlan(0, [0], [], [], [], []))
        if self._controller is not None:
            room = min(facts.max_model_len, facts.num_blocks * facts.block_size)
            self._controller.measure_steps(self._run_drafts, min(facts.max_num_batched_tokens, room))
            if self._controller.measures_proposals and (rows := self._begin_short_rows(max(SIZES))[0]):
                self._controller.measure_proposals([self._rows[row] for row in rows])
                self.run(StepPlan(0, rows, [], [], [], []))

    def measure_steps(self) -> Iterator[MeasuredStep]:
        """Runs some steps, always the same, since each rank runs them, and yields their times. Leaves no trace."""
        facts = self._backend.facts
        room = min(facts.max_model_len, facts.num_blocks * facts.block_size, facts.max_num_batched_tokens)
        length = min(MEASURED_CHUNKS[-1][1], room)
        blocks = list(range(-(-length // facts.block_size)))
        row = self.make_row(0, [0] * length, blocks, SamplingParams(temperature=0.0))
        chunks = [Chunk(0, start, min(end, length)) for start, end in MEASURED_CHUNKS if start < length]
        # The first chunk is the first use of much memory, so it is computed twice, unless that hardly affects its time.
        if facts.device != "cpu" or facts.weight_bytes < LARGE_BYTES:
            self.run(StepPlan(0, [], [row], [], chunks[:1], []))
            self.run(StepPlan(0, [0], [], [], [], []))
        self.run(StepPlan(0, [], [row], [], [], []))
        for chunk in chunks:
            result = self.run(StepPlan(0, [], [], [], [chunk], []))
            yield MeasuredStep(chunk.start, chunk.end, 0, result.computed_us)
        self.run(StepPlan(0, [0], [], [], [], []))
        decodes: dict[int, float] = {}
        for number in MEASURED_DECODES:
            rows, computed_us = self._begin_short_rows(number)
            if rows:
                if len(rows) > 1:
                    # Many prompts with little left to compute, as with cached prefixes.
                    yield MeasuredStep(0, 1, 0, computed_us, len(rows))
                result = self.run(StepPlan(0, [], [], [], [], [Decode(row, 1) for row in rows]))
                self.run(StepPlan(0, rows, [], [], [], []))
                yield MeasuredStep(0, 0, len(rows), result.computed_us)
                decodes[len(rows)] = result.computed_us / 1e6
        if self._controller is not None and len(decodes) > 1:
            self._controller.learn_steps(decodes)

    def _begin_short_rows(self, number: int) -> tuple[list[int], int]:
        """Starts this many rows of two tokens, or as many as fit in a step; none if rows cannot be that long. Returns
        their numbers, and the microseconds that the step took."""
        facts = self._backend.facts
        number = min(number, facts.max_num_seqs, facts.max_num_batched_tokens, facts.num_blocks)
        if facts.block_size < 2 or facts.max_model_len < 3:
            return [], 0
        sampling = SamplingParams(temperature=0.0)
        added = [self.make_row(row, [0], [row], sampling, max_drafts=1) for row in range(number)]
        result = self.run(StepPlan(0, [], added, [], [Chunk(row, 0, 1) for row in range(number)], []))
        return list(range(number)), result.computed_us

    def make_row(
        self, number: int, token_ids: list[int], blocks: list[int], sampling: SamplingParams, max_drafts: int = 0
    ) -> AddedRow:
        """Returns a row that no scheduler made, to measure or warm up with. It has all that the model's layers need."""
        slot = NO_SLOT if self._states is None else number
        # Its layers overwrite each other's KV, but its results mean nothing.
        window_ids = [block for block in blocks for _ in range(self._backend.facts.num_window_groups)]
        return AddedRow(
            number, 0, token_ids, len(token_ids), 0, blocks, sampling,
            max_drafts=max_drafts, state_slot=slot, window_ids=window_ids,
        )  # fmt: skip

    def _run_drafts(self, num_tokens: int) -> None:
        """Runs a decoding row with ``num_tokens - 1`` drafts."""
        blocks = list(range(-(-num_tokens // self._backend.facts.block_size)))
        added = self.make_row(0, [0], blocks, SamplingParams())
        plan = StepPlan(0, [], [added], [], [], [Decode(0, num_tokens)])
        self._backend.reset_blocks(self._rows.apply(plan))
        self._begin_states(plan)
        self._compute(plan, Drafted({0: [0] * (num_tokens - 1)}), self._clock())()
        self._rows.apply(StepPlan(0, [0], [], [], [], []))

    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and computes it. The caller sets ``waited_us`` of the result, which stays 0 here."""
        return self.start_step(plan)()

    def start_step(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Applies a plan and starts its computation. Returns a function that waits for the result. Plans start in order
        and are waited for in order, possibly on another thread."""
        if self._waits_for_rows:
            self._await_rows(plan)
        began = self._clock()
        if plan.copies_out:
            self._backend.copy_out(plan.copies_out)
        self._apply(plan)
        if plan.copies_in:
            self._backend.copy_in(plan.copies_in)
        if plan.is_empty:
            return lambda: StepResult(plan.step, [], [], 0, (self._clock() - began) // 1000)
        plan, idle = self._without_late(plan)
        if plan.is_empty:
            return lambda: StepResult(plan.step, idle, [], 0, 0)
        return self._compute(plan, self._draft(plan), began, idle)

    def _await_rows(self, plan: StepPlan) -> None:
        """Waits until all tokens of the plan's rows are known; steps with other rows may be unfinished."""
        for decode in plan.decodes:
            if (learned := self._rows[decode.row].learned) is not None:
                learned.wait()
        self._newest, self._has_drafts = KNOWN, False

    def _apply(self, plan: StepPlan) -> None:
        controller, rows = self._controller, self._rows
        if controller is not None:
            for number in plan.dropped:
                controller.drop_row(rows[number])
        fresh = rows.apply(plan)
        self._backend.reset_blocks(fresh)
        self._begin_states(plan)
        if self._matching:
            self._matching.difference_update(plan.dropped)
        for added in plan.added:
            if added.grammar:
                self._matching.add(added.row)
                assert self._grammars is not None, f"row {added.row} has a grammar, and the worker no tokenizer"
                rows[added.row].matcher = self._grammars.matcher(added.grammar, added.num_prompt_tokens, added.tenant)
        if controller is not None:
            if fresh or plan.copies_in:
                controller.reset_blocks([*fresh, *(block for _, block in plan.copies_in)])
            for added in plan.added:
                controller.add_row(rows[added.row])

    def _begin_states(self, plan: StepPlan) -> None:
        if self._states is not None:
            for added in plan.added:
                self._states.begin(added.state_slot, added.state_source)

    def _commit_states(self, batch: Batch, results: Sequence[RowResult]) -> None:
        """Advances the rows' recurrent states by the tokens that are only now known to be part of the rows."""
        if self._states is not None:
            commits = batch.state_commits([result.num_computed for result in results])
            if commits:
                self._states.commit(batch, commits)

    def _without_late(self, plan: StepPlan) -> tuple[StepPlan, list[RowResult]]:
        """Returns the plan without rows whose masks are late, and their results. Waits a little if that empties it."""
        grammars, known = self._grammars, self._newest
        if grammars is None or not self._matching:
            return plan, []
        left, idle = without_late(plan, self._rows, lambda row: grammars.is_ready(row, known))
        if left.is_empty and idle:
            grammars.wait_ready([self._rows[result.row] for result in idle], known, EMPTY_STEP_S)
            left, idle = without_late(plan, self._rows, lambda row: grammars.is_ready(row, known))
        return left, idle

    def _draft(self, plan: StepPlan) -> Drafted:
        """Computes drafts, which depend on the tokens chosen last, and on positions if that step has drafts."""
        if self._has_drafts:
            self._newest.wait()
        forced = self._forced(plan)
        if self._controller is None:
            return Drafted(forced) if forced else NOTHING
        return self._controller.propose(plan, self._rows, self._newest.wait, forced)

    def _forced(self, plan: StepPlan) -> Mapping[int, Sequence[int]]:
        """Returns the tokens that grammars force, by row number. Returns none if ranks share the model: each would find
        by its own clock that a row ends, and batches must have the same size on all of them."""
        if self._grammars is None or not self._grammars.puts_off or not self._matching or not plan.max_drafts:
            return {}
        rows = [(self._rows[one.row], one.max_tokens - 1) for one in plan.decodes if one.row in self._matching]
        wanted = [Wanted(row, min(most, row.max_drafts)) for row, most in rows if most > 0]
        if not wanted:
            return {}
        self._newest.wait()
        return self._grammars.forced(wanted, plan.max_drafts)

    def _compute(
        self, plan: StepPlan, drafted: Drafted, began: int, idle: Sequence[RowResult] = ()
    ) -> Callable[[], StepResult]:
        """Starts a step. ``idle`` has the results of the plan's rows that have nothing to compute."""
        is_fenced = self._newest.is_set()
        layers = () if self._controller is None else self._controller.feature_layers
        batch = build_batch(self._rows, plan, drafted.drafts, layers)
        masks = None if self._grammars is None else self._grammars.start_masks(batch.sampled, self._newest)
        masks = with_forced_tokens(batch.sampled, masks, self._newest, self._backend.facts.vocab_size)
        if masks is not None:
            batch = replace(batch, masks=masks)
        finish = self._backend.start_step(batch)
        ends = batch.ends.tolist()
        # Even a backend that is still computing has waited for the masks.
        late = frozenset() if batch.masks is None else batch.masks.late
        places = [
            _skip_row(row, end, num) if row.number in late and num else _expect(row, end, num)
            for row, end, num in zip(batch.rows, ends, batch.num_sampled, strict=True)
        ]
        learned = self._newest = threading.Event()
        self._has_drafts = bool(drafted.drafts)
        if self._waits_for_rows:
            for row, num in zip(batch.rows, batch.num_sampled, strict=True):
                row.learned = learned if num else row.learned

        def result() -> StepResult:
            try:
                sampled, parts, features = finish()
                rows = _results(batch, places, sampled)
                self._commit_states(batch, rows)
                if self._controller is not None and features is not None:
                    self._controller.read(batch, features)
            finally:
                learned.set()  # after a failure as well, or a waiting thread would wait forever
            if batch.masks is not None:
                self._prepare_masks(batch, learned)
            done = self._clock()
            # The device computes one step after another.
            computed_ns = done - max(began, self._done_at)
            self._done_at = done
            if self._controller is not None:
                self._controller.observe(drafted, batch, rows, computed_ns / 1e9, is_fenced)
            for row in rows:
                row.is_predicted = row.row in drafted.tested and drafted.tested[row.row].is_predicted
            return StepResult(plan.step, [*rows, *idle], parts, 0, computed_ns // 1000)

        return result

    def _prepare_masks(self, batch: Batch, known: threading.Event) -> None:
        """Starts computing the masks that no step waits for before the next plan comes."""
        if self._grammars is not None and not self.runs_ahead:
            for row in batch.rows:
                if row.matcher is not None and row.matcher.grammar.is_apart:
                    self._grammars.is_ready(row, known)


def _skip_row(row: Row, end: int, num_sampled: int) -> int:
    """Moves the row back to before the token that its next one is sampled from. Returns ``LATE``."""
    row.num_computed = end - num_sampled
    return LATE


def _expect(row: Row, end: int, num_sampled: int) -> int:
    """Advances the row to the position that is certain. Returns the position of its next token, or -1."""
    if num_sampled > 1:  # how many it gets is not known yet, so the next step that drafts for it waits
        row.num_computed = len(row.history)
        return len(row.history)
    row.num_computed = end
    return row.expect() if num_sampled else -1


def _results(batch: Batch, places: list[int], sampled: list[Sampled]) -> list[RowResult]:
    """Adds the chosen tokens to the rows, and returns the rows' results for the scheduler."""
    results = []
    first = 0
    for row, end, place, num_sampled in zip(batch.rows, batch.ends.tolist(), places, batch.num_sampled, strict=True):
        if not num_sampled:
            vector = row.pooled.vector() if row.pooled is not None and end == len(row.history) else None
            results.append(RowResult(row.number, row.epoch, end, [], vector=vector))
        elif place == LATE:
            results.append(RowResult(row.number, row.epoch, end - num_sampled, []))
        elif num_sampled == 1:
            token = sampled[first]
            row.learn(place, token.token_id)
            results.append(RowResult(row.number, row.epoch, end, [token.token_id], token.logprobs))
        else:
            drafts = batch.sampled[first + num_sampled - 1].drafts
            results.append(_verified(row, drafts, sampled[first : first + num_sampled]))
        matcher = row.matcher if place != LATE else None
        if num_sampled and matcher is not None and matcher.fails_at(batch.sampled[first].position):
            failure, kind = matcher.failure, matcher.failure_kind
            results[-1] = RowResult(row.number, row.epoch, row.num_computed, [], failure=failure, failure_kind=kind)
        first += num_sampled
    return results


def _verified(row: Row, drafts: Sequence[int], sampled: list[Sampled]) -> RowResult:
    """Keeps the tokens up to the first that differs from its draft: later ones follow a rejected draft."""
    num_right = next((index for index, draft in enumerate(drafts) if draft != sampled[index].token_id), len(drafts))
    kept = sampled[: num_right + 1]
    for token in kept:
        row.append(token.token_id)
    row.num_computed = len(row.history) - 1
    parts = [token.logprobs for token in kept if token.logprobs is not None]
    logprobs = join_logprobs(parts) if parts else None
    token_ids = [token.token_id for token in kept]
    return RowResult(row.number, row.epoch, row.num_computed, token_ids, logprobs, num_drafted=len(drafts))
