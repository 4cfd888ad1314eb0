"""The worker's rows: the authority on each row's position between plans. Plain data and integers; uses no tensors."""

import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch.grammar_matcher import GrammarMatcher
from penstock.models.batch.pooled_row import PooledRow
from penstock.models.batch.reasoning_tracker import ReasoningTracker
from penstock.models.batch.row_states import RowState
from penstock.models.batch.token_counts import TokenCounts
from penstock.scheduler.plan import NO_SLOT, AddedRow, SamplingParams, StateSnapshot, StepPlan

Ids = NDArray[np.int64]

UNKNOWN = -1
"""In a history: a token that the device has chosen, or will choose, and that the host does not know yet."""


class TokenLists:
    """Sampling parameters that name tokens, as arrays, which are built once and used in every step. Ids are int64,
    biases float64. ``allowed`` is None if every token is allowed."""

    __slots__ = ("allowed", "bias", "bias_ids", "stops")

    def __init__(self, sampling: SamplingParams) -> None:
        allowed = sampling.allowed_token_ids
        self.allowed: Ids | None = None if allowed is None else np.array(allowed, dtype=np.int64)
        self.bias_ids: Ids = np.array([token_id for token_id, _ in sampling.logit_bias], dtype=np.int64)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        self.stops: Ids = np.array(sampling.stop_token_ids, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Row:
    """One row. ``history[:num_computed]`` has its KV in the row's blocks."""

    number: int
    epoch: int
    history: list[int]
    num_prompt_tokens: int
    num_computed: int
    num_blocks: int
    window_end: int
    """The number of blocks of tokens up to the end of its blocks in windowed groups."""
    sampling: SamplingParams
    lists: TokenLists
    counts: TokenCounts | None
    """Kept only if a penalty needs them."""
    pooled: PooledRow | None
    """Set if the row gets a vector and no tokens."""
    max_drafts: int = 0
    tenant: str = ""
    matcher: GrammarMatcher | None = None
    """Set if the row's output must match a grammar."""
    reasoning: ReasoningTracker | None = None
    """Set if the row's reasoning has a limit."""
    prediction: list[int] = field(default_factory=list)
    """The output that the caller expects; empty if it expects none."""
    state: RowState | None = None
    """Set if the model has recurrent layers."""
    is_dropped: bool = False
    """Whether a plan has dropped the row; a step that began earlier may still compute it."""
    adapter: int = 0
    """The slot of its LoRA adapter; 0: none."""
    learned: threading.Event | None = None
    """Set once the tokens of the newest step that samples for the row are known; None if no backend waits for that."""

    def expect(self) -> int:
        """Extends the history by a token that is being chosen. Returns its position, for ``learn``."""
        self.history.append(UNKNOWN)
        return len(self.history) - 1

    def learn(self, position: int, token_id: int) -> None:
        """Sets the token at a position that ``expect`` returned."""
        self.history[position] = token_id
        if self.counts is not None:
            self.counts.count_token(token_id)

    def append(self, token_id: int) -> None:
        """Adds a sampled token to the history."""
        self.learn(self.expect(), token_id)


class RowTable:
    """All rows, and their block tables as one array.

    A plan that contradicts the rows is a bug in the scheduler and raises AssertionError.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hidden_size: int,
        num_state_slots: int = 0,
        num_window_groups: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hidden_size = hidden_size
        self.num_state_slots = num_state_slots
        self.num_window_groups = num_window_groups
        self._rows: dict[int, Row] = {}
        self._tables: Ids = np.full((16, 16), num_blocks, dtype=np.int64)
        # Entries before a row's window are ids that nothing depends on.
        self._window_tables: Ids = np.zeros((num_window_groups, 16, 16), dtype=np.int64)

    def __getitem__(self, number: int) -> Row:
        assert number in self._rows, f"the plan names row {number}, which does not exist"
        return self._rows[number]

    def apply(self, plan: StepPlan) -> list[int]:
        """Drops, adds and extends rows. Returns the blocks that rows will write; their content is stale."""
        for number in plan.dropped:
            assert number in self._rows, f"the plan drops row {number}, which does not exist"
            self._rows.pop(number).is_dropped = True
        fresh: list[int] = []
        for added in plan.added:
            self._add(added)
            num_known = -(-added.num_computed // self.block_size)
            fresh += added.block_ids[num_known:]
            fresh += added.window_ids[max(0, num_known - added.window_start) * self.num_window_groups :]
        for more in plan.blocks:
            row = self[more.row]
            self._extend(row, more.block_ids)
            self._extend_windows(row, more.window_ids)
            fresh += more.block_ids + more.window_ids
        for snapshot in plan.snapshots:
            self._add_snapshot(snapshot)
        return fresh

    def tables(self, rows: list[Row]) -> Ids:
        """Returns the block tables of rows, as wide as the longest or wider. Ids past a row's end are undefined."""
        width = max(row.num_blocks for row in rows)
        return self._tables[[row.number for row in rows], :width]

    def window_tables(self, rows: list[Row]) -> Ids:
        """Returns the tables of rows in the windowed groups, (groups, R, N), as wide as ``tables``. Ids before a row's
        window or past its end are undefined, but are those of blocks."""
        width = max(row.num_blocks for row in rows)
        return self._window_tables[:, [row.number for row in rows], :width]

    def blocks(self, row: Row, begin: int) -> Ids:
        """Returns a row's blocks from index ``begin`` on."""
        return self._tables[row.number, begin : row.num_blocks]

    def window_blocks(self, row: Row, begin: int) -> Ids:
        """Returns a row's blocks in the windowed groups, (groups, N), from index ``begin`` on."""
        return self._window_tables[:, row.number, begin : row.window_end]

    def _add(self, added: AddedRow) -> None:
        assert added.row not in self._rows, f"the plan adds row {added.row}, which exists"
        assert 0 <= added.num_computed < len(added.token_ids), f"row {added.row} has nothing to compute"
        assert 1 <= added.num_prompt_tokens <= len(added.token_ids), f"row {added.row} has no prompt"
        sampling = added.sampling
        penalised = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        row = Row(
            added.row,
            added.epoch,
            list(added.token_ids),
            added.num_prompt_tokens,
            added.num_computed,
            0,
            added.window_start,
            sampling,
            TokenLists(sampling),
            TokenCounts(added.token_ids, added.num_prompt_tokens) if penalised else None,
            None if added.pooling is None else PooledRow(added.pooling, len(added.token_ids), self.hidden_size),
            added.max_drafts,
            added.tenant,
            reasoning=None
            if sampling.reasoning is None
            else ReasoningTracker(sampling.reasoning, added.num_prompt_tokens),
            prediction=added.prediction,
            state=self._state(added),
            adapter=added.adapter,
        )
        self._rows[added.row] = row
        self._extend(row, added.block_ids)
        self._extend_windows(row, added.window_ids)
        assert row.num_blocks * self.block_size >= row.num_computed, f"row {added.row} has KV outside its blocks"

    def _state(self, added: AddedRow) -> RowState | None:
        if not self.num_state_slots:
            return None
        assert 0 <= added.state_slot < self.num_state_slots, f"row {added.row} has no such slot for its state"
        assert added.state_source < self.num_state_slots, f"row {added.row} begins with no such state"
        begins_empty = added.state_source == NO_SLOT
        assert begins_empty == (added.num_computed == 0), f"row {added.row} begins with another state"
        return RowState(added.state_slot)

    def _add_snapshot(self, snapshot: StateSnapshot) -> None:
        row = self[snapshot.row]
        assert row.state is not None, f"row {row.number} has no state"
        assert 0 <= snapshot.slot < self.num_state_slots, f"row {row.number} has no such slot"
        assert snapshot.position % self.block_size == 0, f"row {row.number} has no block that ends at its snapshot"
        assert snapshot.position > row.num_computed, f"row {row.number} has passed position {snapshot.position}"
        row.state.snapshots.append((snapshot.position, snapshot.slot))

    def _extend(self, row: Row, block_ids: list[int]) -> None:
        if not block_ids:
            return
        assert 0 <= min(block_ids) <= max(block_ids) < self.num_blocks, f"row {row.number} has no such block"
        end = row.num_blocks + len(block_ids)
        self._grow(row.number + 1, end)
        self._tables[row.number, row.num_blocks : end] = block_ids
        row.num_blocks = end

    def _extend_windows(self, row: Row, block_ids: list[int]) -> None:
        if not block_ids:
            return
        assert 0 <= min(block_ids) <= max(block_ids) < self.num_blocks, f"row {row.number} has no such block"
        assert len(block_ids) % self.num_window_groups == 0, f"row {row.number} lacks blocks of a windowed group"
        end = row.window_end + len(block_ids) // self.num_window_groups
        self._grow(row.number + 1, end)
        of_groups: Ids = np.array(block_ids, dtype=np.int64).reshape(-1, self.num_window_groups).T
        self._window_tables[:, row.number, row.window_end : end] = of_groups
        row.window_end = end

    def _grow(self, num_rows: int, width: int) -> None:
        have_rows, have_width = self._tables.shape
        if num_rows <= have_rows and width <= have_width:
            return
        shape = (max(have_rows, 2 * num_rows) if num_rows > have_rows else have_rows,
                 max(have_width, 2 * width) if width > have_width else have_width)  # fmt: skip
        grown: Ids = np.full(shape, self.num_blocks, dtype=np.int64)
        grown[:have_rows, :have_width] = self._tables
        self._tables = grown
        of_windows: Ids = np.zeros((self.num_window_groups, *shape), dtype=np.int64)
        of_windows[:, :have_rows, :have_width] = self._window_tables
        self._window_tables = of_windows
