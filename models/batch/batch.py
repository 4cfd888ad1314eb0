"""A step's work as one ragged batch: flat arrays over tokens, and one entry per row. Uses no tensors and no device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.models.batch.pooled_row import PooledRow
from penstock.models.batch.row_states import StateCommit, StateStep
from penstock.models.batch.rows import Ids, Row, RowTable
from penstock.models.batch.sampled_positions import NO_DRAFTS, GrammarBitmasks, SampledPosition
from penstock.models.batch.token_places import positions_of, slots_of
from penstock.scheduler.plan import PromptLogprobsPart, StepPlan, TokenLogprobs


@dataclass(frozen=True)
class Batch:
    """T tokens of R rows, of which S positions are sampled. A row's tokens are contiguous. Rows with one token come
    first, longest context first."""

    rows: list[Row]
    starts: Ids
    """(R,): position of each row's first token."""
    ends: Ids
    """(R,): position after each row's last token. The KV before it is valid once the step has written its own and the
    row's drafts have been accepted."""
    token_starts: Ids
    """(R + 1,): row r's tokens are [token_starts[r], token_starts[r + 1])."""
    token_ids: Ids
    """(T,)."""
    table: RowTable
    sampled: list[SampledPosition]
    """The S sampled positions, in the order of the rows."""
    num_sampled: list[int]
    """Sampled positions per row: one more than its drafts if its last token ends its history, else 0."""
    masks: GrammarBitmasks | None = None
    """None if no sampled position has a grammar."""
    feature_layers: tuple[int, ...] = ()
    """The layers whose input hidden states are returned for all tokens. The number of layers stands for those after the
    last norm."""
    states: Sequence[StateStep] = ()
    """How the step advances the rows' recurrent states: R entries, or none."""

    # Not every backend needs the following, and a step of a small model is short: they are computed at first use,
    # which must come before the next plan.

    @cached_property
    def tables(self) -> Ids:
        """(R, at least the blocks of the longest row): block ids. Entries past a row's end are undefined."""
        return self.table.tables(self.rows)

    @cached_property
    def window_tables(self) -> Ids:
        """(windowed groups, R, blocks): ids of their blocks, as wide as ``tables``. Those before a
        row's window and past its end are undefined."""
        return self.table.window_tables(self.rows)

    @cached_property
    def sampled_tokens(self) -> Ids:
        """(S,): the index in the batch of the token that each sampled position follows."""
        if max(self.num_sampled, default=0) <= 1:  # nothing is drafted
            return self.token_starts[1:][np.array(self.num_sampled, dtype=np.bool_)] - 1
        numbers = np.array(self.num_sampled, dtype=np.int64)
        behind = np.cumsum(numbers)
        return np.repeat(self.token_starts[1:] - behind, numbers) + np.arange(len(self.sampled))

    @cached_property
    def positions(self) -> Ids:
        """(T,)."""
        return positions_of(self.starts, self.token_starts)

    @property
    def slots(self) -> Ids:
        """(T,): where each token's KV is written: block * block_size + offset."""
        return slots_of(self.positions, self.token_starts, self.tables, self.table.block_size)

    @property
    def window_slots(self) -> list[Ids]:
        """(T,) for each windowed group: where each token's KV is written in its layers."""
        return [
            slots_of(self.positions, self.token_starts, tables, self.table.block_size) for tables in self.window_tables
        ]

    @cached_property
    def adapters(self) -> NDArray[np.int32] | None:
        """(T,): the slot of each token's LoRA adapter, 0 for none; None if no token has one."""
        slots = [row.adapter for row in self.rows]
        return np.repeat(np.array(slots, dtype=np.int32), self.ends - self.starts) if any(slots) else None

    def pooled_spans(self) -> Iterator[tuple[PooledRow, int, int]]:
        """Yields, for each row with hidden states that count towards its vector: the pooled row, the index in the batch
        of the first such token, and their number."""
        for index, row in enumerate(self.rows):
            if row.pooled is not None:
                start, end, first = int(self.starts[index]), int(self.ends[index]), int(self.token_starts[index])
                counted = row.pooled.counted(start, end)
                if counted:
                    yield row.pooled, first + counted.start - start, len(counted)

    def state_commits(self, num_computed: Sequence[int]) -> list[StateCommit]:
        """Returns what remains to be done for the rows' states, once their ``num_computed`` after the step is known."""
        commits = []
        for index, (row, step) in enumerate(zip(self.rows, self.states, strict=False)):
            certain = int(self.starts[index]) + step.certain
            if row.state is not None and num_computed[index] > certain:
                saves = row.state.take_saves(certain, num_computed[index])
                commits.append(StateCommit(index, num_computed[index] - certain, saves))
        return commits

    def prompt_spans(self) -> Iterator[tuple[Row, int, int, int]]:
        """Yields, for each row whose prompt log-probabilities are requested and computed by this batch: the row, the
        index in the batch of the token that predicts the first of them, their number, and the first one's position."""
        for row, start, end, first in zip(
            self.rows, self.starts.tolist(), self.ends.tolist(), self.token_starts.tolist(), strict=False
        ):
            # The hidden state at p - 1 predicts position p.
            last = min(end, row.num_prompt_tokens - 1)
            if row.sampling.prompt_logprobs is not None and start < last:
                yield row, first, last - start, start + 1


class FeatureLines(Protocol):
    """Features of positions, one line for each, in the backend's own memory, for example an array on the host."""

    def __len__(self) -> int:
        """The number of lines."""

    def __getitem__(self, part: slice | list[int], /) -> "FeatureLines":
        """Selects lines; a slice may return a view."""

    def copy(self) -> "FeatureLines":
        """Copies the lines, so that they no longer hold the memory of a larger array."""


class Sampled(NamedTuple):
    """The token chosen for a sampled position."""

    token_id: int
    logprobs: TokenLogprobs | None


def join_logprobs(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Concatenates the log-probabilities of one or several tokens."""
    joined = TokenLogprobs(parts[0].num_top, [], [], [])
    for part in parts:
        joined.extend(part)
    return joined


class BatchResult(NamedTuple):
    """A backend's results for a batch."""

    sampled: list[Sampled]
    """One per sampled position, in their order."""
    prompt_logprobs: list[PromptLogprobsPart]
    features: FeatureLines | None = None
    """(T, feature layers * hidden), if the batch has ``feature_layers``."""


def build_batch(
    table: RowTable,
    plan: StepPlan,
    drafts: Mapping[int, Sequence[int]] = MappingProxyType({}),
    feature_layers: tuple[int, ...] = (),
) -> Batch:
    """Builds the batch of a plan that was applied to the rows. A plan may name each row once. ``drafts`` maps a row's
    number to the tokens proposed to follow its history; only decoding rows may have drafts."""
    spans = [(table[chunk.row], chunk.start, chunk.end, NO_DRAFTS) for chunk in plan.chunks]
    for decode in plan.decodes:
        row, drafted = table[decode.row], drafts.get(decode.row, NO_DRAFTS)
        end = len(row.history)
        if drafted:
            assert len(drafted) < decode.max_tokens, f"row {row.number} has more drafts than the plan has room for"
            end += len(drafted)
        spans.append((row, row.num_computed, end, drafted))
    # Decoding rows of similar length are read together, so they must be contiguous.
    spans.sort(key=lambda span: (span[2] - span[1] > 1, -span[2]))
    sampled: list[SampledPosition] = []
    num_sampled: list[int] = []
    token_ids: list[int] = []
    for row, start, end, drafted in spans:
        known = end - len(drafted)
        assert row.num_computed == start < known <= len(row.history), f"row {row.number} is not at position {start}"
        assert end <= row.num_blocks * table.block_size, f"row {row.number} has no block for position {end - 1}"
        if table.num_window_groups:
            assert end <= row.window_end * table.block_size, f"row {row.number} has no window at position {end - 1}"
        token_ids += row.history[start:known] if known - start > 1 else (row.history[start],)
        if known < len(row.history) or row.pooled is not None:
            num_sampled.append(0)
            continue
        sampled.append(SampledPosition(row))
        num_sampled.append(1 + len(drafted))
        if drafted:
            token_ids += drafted
            sampled += [SampledPosition(row, drafted[:number]) for number in range(1, len(drafted) + 1)]
    rows = [row for row, *_ in spans]
    assert len({row.number for row in rows}) == len(rows), "a row is named twice in one plan"
    return Batch(
        rows=rows,
        starts=np.array([start for _, start, _, _ in spans], dtype=np.int64),
        ends=np.array([end for _, _, end, _ in spans], dtype=np.int64),
        token_starts=np.array([0, *accumulate(end - start for _, start, end, _ in spans)], dtype=np.int64),
        token_ids=np.array(token_ids, dtype=np.int64),
        table=table,
        sampled=sampled,
        num_sampled=num_sampled,
        feature_layers=feature_layers,
        states=_state_steps(spans),
    )


def _state_steps(spans: Sequence[tuple[Row, int, int, Sequence[int]]]) -> list[StateStep]:
    """Returns how the states of rows with these starts, ends and drafts advance; nothing without states."""
    steps = []
    for row, start, end, drafted in spans:
        if row.state is None:
            return []
        certain = end - len(drafted)
        if row.matcher is not None and certain == len(row.history) and row.pooled is None:
            certain -= 1  # its mask may come late, and then the token is computed again
        steps.append(StateStep(row.state.slot, certain - start, row.state.take_saves(start, certain)))
    return steps
