"""A worker without a model: row state, KV slots, and tokens that are a function of the history.

It validates every plan. Each slot has a tag of the history that its KV was computed from. Reading anything else,
writing to a block that another row holds, or using a row number twice raises ``BrokenPlan``. So does computing with a
wrong recurrent state, if the facts name slots for states.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.scheduler.plan import (
    AddedRow,
    Decode,
    Pooling,
    PromptLogprobsPart,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    num_row_numbers,
)
from penstock.scheduler.testing.fake_states import BrokenPlan, FakeStates
from penstock.scheduler.worker_config import WorkerFacts

NextToken = Callable[[Sequence[int], SamplingParams], int]
"""Returns the token that follows a history."""


class WorkerKilled(Exception):
    """Raised when a step kills the worker."""


def token_of_history(vocab_size: int) -> NextToken:
    """Returns a function whose token depends on the history's length, its last eight tokens and the seed: one lost,
    repeated or changed token changes all that follow."""

    def next_token(history: Sequence[int], sampling: SamplingParams) -> int:
        return hash((len(history), sampling.seed, *history[-8:])) % vocab_size

    return next_token


def vector_of(token_ids: Sequence[int], hidden_size: int) -> bytes:
    """Returns the vector of a row whose pooled positions have these ids: their number, their sum, and powers of a
    half."""
    values = [float(len(token_ids)), float(sum(token_ids)), *(0.5**index for index in range(hidden_size))]
    return array("f", values[:hidden_size]).tobytes()


@dataclass(slots=True)
class FakeRow:
    """A row's state in the worker."""

    number: int
    epoch: int
    history: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    window_start: int
    window_ids: list[int]
    """The blocks of windowed groups, as ``AddedRow`` has them; earlier ones stay, though they belong to others."""
    sampling: SamplingParams
    pooling: Pooling | None = None
    max_drafts: int = 0
    pooled_ids: list[int] = field(default_factory=list)
    """The ids of the pooled positions that are computed so far."""
    tags: list[int] = field(default_factory=list)
    """The tags of the KV of each position, as ``Slots`` made them."""
    late_steps: str = ""
    """Its grammar: one character per step that could bring a token, a blank where its mask is late."""
    has_prediction: bool = False

    def sits_out(self) -> bool:
        """Returns whether its mask is late in this step."""
        is_late = self.late_steps.startswith(" ")
        self.late_steps = self.late_steps[1:]
        return is_late


class Slots:
    """The KV cache. This one tracks nothing, for benchmarks with long contexts."""

    def start_row(self, row: FakeRow) -> None:
        """Begins a row, whose first blocks are shared."""

    def grow(self, row: FakeRow, block_ids: Sequence[int]) -> None:
        """Gives new blocks to a row."""

    def grow_window(self, row: FakeRow, block_ids: Sequence[int]) -> None:
        """Gives new blocks of windowed groups to a row."""

    def end(self, row: FakeRow) -> None:
        """Releases a row's blocks."""

    def read(self, row: FakeRow, stop: int) -> None:
        """Reads a row's positions below ``stop``."""

    def write(self, row: FakeRow, start: int, stop: int) -> None:
        """Stores a row's KV of these positions."""

    def spoil(self, row: FakeRow, start: int, stop: int) -> None:
        """Stores the KV of rejected tokens at these positions."""

    def copy_out(self, block: int, slot: int) -> None:
        """Copies a block to the host tier."""

    def copy_in(self, slot: int, block: int) -> None:
        """Copies a block back from the host tier."""


class CheckedSlots(Slots):
    """Tracks each slot's KV: a chained hash of the history up to its position, or None for invalid content."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._tags: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._host_tags: list[list[int | None]] = [[None] * block_size for _ in range(num_host_blocks)]
        self._num_holders = [0] * num_blocks
        self._writers: list[tuple[int, int] | None] = [None] * num_blocks

    def start_row(self, row: FakeRow) -> None:
        """The blocks after the computed ones are new."""
        num_shared, rest = divmod(row.num_computed, self._block_size)
        if rest:
            raise BrokenPlan(f"row {row.number} begins inside a block")
        if row.num_computed >= len(row.history):
            raise BrokenPlan(f"row {row.number} has nothing to compute")
        for block in row.block_ids[:num_shared]:
            self._num_holders[block] += 1
        self.grow(row, row.block_ids[num_shared:])
        self._tag(row)
        self.read(row, row.num_computed)

    def grow(self, row: FakeRow, block_ids: Sequence[int]) -> None:
        """Checks that the blocks are free."""
        for block in block_ids:
            if self._num_holders[block]:
                raise BrokenPlan(f"row {row.number} is given block {block}, which another row holds")
            self._num_holders[block] = 1
            self._writers[block] = (row.number, row.epoch)
            self._tags[block] = [None] * self._block_size

    def end(self, row: FakeRow) -> None:
        """The blocks' content stays, because published blocks may be shared later."""
        for block in row.block_ids:
            self._num_holders[block] -= 1

    def read(self, row: FakeRow, stop: int) -> None:
        """Checks that each slot holds the KV of the row's own history."""
        size = self._block_size
        if stop > len(row.block_ids) * size:
            raise BrokenPlan(f"row {row.number} reads beyond its blocks")
        for index in range(-(-stop // size)):
            length = min(size, stop - index * size)
            block = row.block_ids[index]
            wanted = row.tags[index * size : index * size + length]
            if self._tags[block][:length] != wanted:
                raise BrokenPlan(f"row {row.number} reads foreign or stale KV in block {block}")

    def write(self, row: FakeRow, start: int, stop: int) -> None:
        """Checks that the blocks were given to the row as new."""
        self._tag(row)
        self._store(row, start, row.tags[start:stop])

    def spoil(self, row: FakeRow, start: int, stop: int) -> None:
        """Marks the content as invalid."""
        self._store(row, start, [None] * (stop - start))

    def _store(self, row: FakeRow, start: int, tags: Sequence[int | None]) -> None:
        size = self._block_size
        if start + len(tags) > len(row.block_ids) * size:
            raise BrokenPlan(f"row {row.number} writes beyond its blocks")
        for position, tag in enumerate(tags, start):
            block = row.block_ids[position // size]
            if self._writers[block] != (row.number, row.epoch):
                raise BrokenPlan(f"row {row.number} writes to block {block}, which is not its own")
            self._tags[block][position % size] = tag

    def copy_out(self, block: int, slot: int) -> None:
        """Checks that the block is complete: only such blocks can be found in the host tier."""
        if None in self._tags[block]:
            raise BrokenPlan(f"block {block} is copied out, and is not whole")
        self._host_tags[slot] = self._tags[block].copy()

    def copy_in(self, slot: int, block: int) -> None:
        """Checks that no row holds the block."""
        if self._num_holders[block]:
            raise BrokenPlan(f"slot {slot} is copied to block {block}, which a row holds")
        self._tags[block] = self._host_tags[slot].copy()
        self._writers[block] = None

    @staticmethod
    def _tag(row: FakeRow) -> None:
        tag = row.tags[-1] if row.tags else 0
        for token_id in row.history[len(row.tags) :]:
            tag = hash((tag, token_id))
            row.tags.append(tag)


class FakeWorker:
    """Runs plans, one at a time."""

    def __init__(
        self,
        facts: WorkerFacts,
        next_token: NextToken,
        slots: Slots,
        kills: Callable[[FakeRow], bool] = lambda row: False,
    ) -> None:
        """``kills``: whether a row kills the worker when it is computed in its current state."""
        self._facts = facts
        self._next_token = next_token
        self._slots = slots
        self._states = FakeStates(facts.num_state_slots, facts.block_size)
        self._kills = kills
        self._rows: dict[int, FakeRow] = {}
        self._step: int | None = None
        """The next step. The first may have any number, because a worker may replace another."""

    def run(self, plan: StepPlan) -> StepResult:
        """Returns the result of the next plan. Raises BrokenPlan and WorkerKilled."""
        if self._step not in (None, plan.step):
            raise BrokenPlan(f"step {plan.step} comes, but {self._step} is next")
        self._step = plan.step + 1
        for copies in (plan.copies_out, plan.copies_in):
            if any(len(set(ids)) < len(copies) for ids in zip(*copies, strict=True)):
                raise BrokenPlan("a block or a slot is copied twice")
        for block, slot in plan.copies_out:
            self._slots.copy_out(block, slot)
        for number in plan.dropped:
            self._slots.end(self._rows.pop(number))
            self._states.end_row(number)
        # A block that is then given to a row as a new one loses the content that was copied to it.
        for slot, block in plan.copies_in:
            self._slots.copy_in(slot, block)
        for added in plan.added:
            self._add(added)
        self._states.start_rows(plan.added)
        self._states.name_slots(plan.snapshots)
        for more in plan.blocks:
            row = self._rows[more.row]
            self._slots.grow(row, more.block_ids)
            row.block_ids += more.block_ids
            self._slots.grow_window(row, more.window_ids)
            row.window_ids += more.window_ids
        numbers = [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]
        if len(set(numbers)) != len(numbers):
            raise BrokenPlan("a row is named twice in a step")
        for number in numbers:
            if self._kills(self._rows[number]):
                raise WorkerKilled(f"row {number} killed the worker")
        for number in numbers:  # the whole batch reads before any of it is written
            self._slots.read(self._rows[number], self._rows[number].num_computed)
        self._check_tokens(plan)
        prompt_logprobs: list[PromptLogprobsPart] = []
        rows = [self._chunk(chunk.row, chunk.start, chunk.end, prompt_logprobs) for chunk in plan.chunks]
        room = plan.max_drafts
        for decode in plan.decodes:
            rows.append(self._decode(decode, room))
            room -= rows[-1].num_drafted
        return StepResult(plan.step, rows, prompt_logprobs, waited_us=0, computed_us=1)

    def _check_tokens(self, plan: StepPlan) -> None:
        num_tokens = sum(chunk.end - chunk.start for chunk in plan.chunks) + len(plan.decodes) + plan.max_drafts
        if num_tokens > self._facts.max_num_batched_tokens:
            raise BrokenPlan(f"step {plan.step} has {num_tokens} tokens")
        if plan.max_drafts > sum(decode.max_tokens - 1 for decode in plan.decodes):
            raise BrokenPlan(f"step {plan.step} has room for more drafts than its rows may have")

    def _add(self, added: AddedRow) -> None:
        number = added.row
        if not 0 <= number < num_row_numbers(self._facts.max_num_seqs):
            raise BrokenPlan(f"there is no row {number}")
        if number in self._rows:
            raise BrokenPlan(f"row {number} begins while it lives")
        row = FakeRow(
            number,
            added.epoch,
            added.token_ids.copy(),
            added.num_prompt_tokens,
            added.num_computed,
            added.block_ids.copy(),
            added.window_start,
            added.window_ids.copy(),
            added.sampling,
            added.pooling,
            added.max_drafts,
            late_steps=added.grammar,
            has_prediction=bool(added.prediction),
        )
        if row.pooling is not None and row.num_computed > row.pooling.positions(len(row.history)).start:
            raise BrokenPlan(f"row {number} begins after hidden states that its vector is of")
        self._slots.start_row(row)
        self._rows[number] = row
        if len(self._rows) > self._facts.max_num_seqs:
            raise BrokenPlan("more rows live than may run")

    def _chunk(self, number: int, start: int, end: int, prompt_logprobs: list[PromptLogprobsPart]) -> RowResult:
        row = self._rows[number]
        if not start == row.num_computed < end <= len(row.history):
            raise BrokenPlan(f"row {number} cannot compute {start} to {end}")
        is_late = end == len(row.history) and row.sits_out()
        if is_late and end % self._facts.block_size:
            end -= 1  # otherwise others may read the block as soon as it is planned
        self._slots.write(row, start, end)
        row.num_computed = end
        if is_late:
            row.num_computed = len(row.history) - 1
        self._states.advance(number, row.history, row.num_computed)
        if row.pooling is not None:
            return self._pool(row, start, end)
        last = min(end, row.num_prompt_tokens - 1)
        if row.sampling.prompt_logprobs is not None and last > start:
            known = row.history[start + 1 : last + 1]
            part = _logprobs(known, row.sampling.prompt_logprobs, start + 1)
            prompt_logprobs.append(PromptLogprobsPart(number, row.epoch, start + 1, part))
        token_ids = [self._sample(row)] if end == len(row.history) and not is_late else []
        return self._result(row, token_ids)

    def _pool(self, row: FakeRow, start: int, end: int) -> RowResult:
        assert row.pooling is not None
        counted = row.pooling.positions(len(row.history))
        row.pooled_ids += row.history[max(start, counted.start) : min(end, counted.stop)]
        is_whole = end == len(row.history)
        vector = vector_of(row.pooled_ids, self._facts.hidden_size) if is_whole else None
        return RowResult(row.number, row.epoch, end, [], vector=vector)

    def _decode(self, decode: Decode, room: int) -> RowResult:
        number, max_tokens = decode.row, decode.max_tokens
        row = self._rows[number]
        if row.pooling is not None:
            raise BrokenPlan(f"row {number} is pooled, and is continued")
        start = row.num_computed
        if start != len(row.history) - 1:
            raise BrokenPlan(f"row {number} is continued before its history is computed")
        if not 1 <= max_tokens <= 1 + row.max_drafts:
            raise BrokenPlan(f"row {number} is continued by {max_tokens} tokens")
        if start + max_tokens > self._facts.max_model_len:
            raise BrokenPlan(f"row {number} leaves the model's context")
        if row.sits_out():
            self._slots.write(row, start, start + 1)
            return self._result(row, [])
        # As if a drafter had proposed as many drafts as allowed: all are computed, some accepted.
        num_drafted = min(max_tokens - 1, room)
        stop = start + 1 + start % (num_drafted + 1)
        token_ids = [self._sample(row) for _ in range(start, stop)]
        self._slots.write(row, start, stop)
        self._slots.spoil(row, stop, start + 1 + num_drafted)
        row.num_computed = stop
        self._states.advance(number, row.history, stop)
        return self._result(row, token_ids, num_drafted)

    def _sample(self, row: FakeRow) -> int:
        token_id = self._next_token(row.history, row.sampling)
        if len(row.history) - row.num_prompt_tokens < row.sampling.min_tokens:
            while token_id in row.sampling.stop_token_ids:
                token_id = (token_id + 1) % self._facts.vocab_size
        row.history.append(token_id)
        return token_id

    def _result(self, row: FakeRow, token_ids: list[int], num_drafted: int = 0) -> RowResult:
        logprobs = None
        if row.sampling.logprobs is not None and token_ids:
            logprobs = _logprobs(token_ids, row.sampling.logprobs, len(row.history) - len(token_ids))
        is_predicted = bool(num_drafted) and row.has_prediction
        return RowResult(
            row.number, row.epoch, row.num_computed, token_ids, logprobs,
            num_drafted=num_drafted, is_predicted=is_predicted,
        )  # fmt: skip


def _logprobs(token_ids: Sequence[int], num_top: int, start: int) -> TokenLogprobs:
    """Returns numbers that encode the position and the token that they belong to."""
    chosen = [-float(start + offset) - token_id / 1e6 for offset, token_id in enumerate(token_ids)]
    top_token_ids = [token_id + rank for token_id in token_ids for rank in range(num_top)]
    top = [value - rank for value in chosen for rank in range(num_top)]
    return TokenLogprobs(num_top, chosen, top_token_ids, top)
