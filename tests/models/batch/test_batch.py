"""Rows and batches: plans change rows as they say, and a batch's groups compute what the plain reference computes."""

import itertools

import pytest
import torch

from penstock.kernels.reference.ops import attention, paged_attention
from penstock.models.backends.reference import attention_groups
from penstock.models.batch.batch import build_batch
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import AddedRow, Chunk, Decode, RowBlocks, SamplingParams, StepPlan

BLOCK = 16


def added(row, length, blocks, num_computed=0, epoch=0):
    return AddedRow(row, epoch, list(range(100, 100 + length)), length, num_computed, blocks, SamplingParams())


def plan(dropped=(), added=(), blocks=(), chunks=(), decodes=()):
    return StepPlan(0, list(dropped), list(added), list(blocks), list(chunks), list(decodes))


@pytest.fixture
def table():
    return RowTable(num_blocks=64, block_size=BLOCK, hidden_size=8)


def test_blocks_that_hold_no_cached_prefix_are_renewed(table):
    fresh = table.apply(plan(added=[added(0, 40, [5, 6, 7], num_computed=32), added(1, 3, [9])]))
    assert fresh == [7, 9]
    assert table.apply(plan(blocks=[RowBlocks(1, [11, 12])])) == [11, 12]
    assert table.tables([table[1], table[0]])[:, :3].tolist() == [[9, 11, 12], [5, 6, 7]]


def test_a_dropped_row_is_gone_before_the_same_number_is_added(table):
    table.apply(plan(added=[added(0, 5, [1])]))
    table.apply(plan(dropped=[0], added=[added(0, 20, [1, 2], epoch=1)]))
    assert (table[0].epoch, len(table[0].history), table[0].num_blocks, len(table._rows)) == (1, 20, 2, 1)


def test_the_table_grows_with_rows_and_blocks():
    table = RowTable(num_blocks=5000, block_size=BLOCK, hidden_size=8)
    for row in range(100):
        table.apply(plan(added=[added(row, 1, [row])]))
    table.apply(plan(blocks=[RowBlocks(3, list(range(1000, 1300)))]))
    assert table.tables([table[99]])[0, 0] == 99
    assert table.tables([table[3]])[0].tolist()[:301] == [3, *range(1000, 1300)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (plan(dropped=[7]), "row 7"),
        (plan(added=[added(0, 5, [1])]), "row 0, which exists"),
        (plan(added=[added(1, 5, [64])]), "no such block"),
        (plan(added=[added(1, 5, [-1])]), "no such block"),
        (plan(added=[added(1, 5, [1], num_computed=5)]), "nothing to compute"),
        (plan(added=[added(1, 50, [1], num_computed=32)]), "outside its blocks"),
        (plan(blocks=[RowBlocks(9, [1])]), "row 9"),
        (plan(decodes=[Decode(9, 1)]), "row 9"),
        (plan(chunks=[Chunk(0, 1, 5)]), "is not at position 1"),
        (plan(chunks=[Chunk(0, 0, 6)]), "is not at position 0"),
        (plan(chunks=[Chunk(0, 0, 0)]), "is not at position 0"),
        (plan(chunks=[Chunk(0, 0, 5)], decodes=[Decode(0, 1)]), "named twice"),
        (plan(added=[added(1, 20, [1])], chunks=[Chunk(1, 0, 20)]), "no block for position 19"),
    ],
)
def test_a_plan_that_contradicts_the_rows_is_refused(table, bad, says):
    table.apply(plan(added=[added(0, 5, [1])]))
    with pytest.raises(AssertionError, match=says):
        run(table, bad)


def run(table, bad):
    table.apply(bad)
    build_batch(table, bad)


def test_a_batch_is_flat_and_marks_the_rows_that_sample(table):
    rows = [added(0, 40, [3, 4, 5]), added(1, 18, [8, 9], num_computed=16), added(2, 33, [1, 2, 6], num_computed=32)]
    first = plan(added=rows, chunks=[Chunk(0, 0, 20), Chunk(1, 16, 18)], decodes=[Decode(2, 1)])
    table.apply(first)
    batch = build_batch(table, first)
    assert [row.number for row in batch.rows] == [2, 0, 1]
    assert batch.token_starts.tolist() == [0, 1, 21, 23]
    assert batch.num_sampled == [1, 0, 1]
    assert batch.sampled_tokens.tolist() == [0, 22]
    assert batch.token_ids.tolist() == [132, *range(100, 120), 116, 117]
    assert batch.positions.tolist() == [32, *range(20), 16, 17]
    slots = [6 * 16, *range(3 * 16, 4 * 16), *range(4 * 16, 4 * 16 + 4), 9 * 16, 9 * 16 + 1]
    assert batch.slots.tolist() == slots


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (5, False), (33, False), (33, True), (64, True)])
@pytest.mark.parametrize("limit", [1 << 18, 64])
def test_groups_compute_what_the_plain_reference_computes(window, chunked, limit, monkeypatch):
    """Decodes of very different lengths, prompts and chunks together; every way to cut them gives the same."""
    monkeypatch.setattr(attention_groups, "MAX_GATHERED_TOKENS", limit)
    torch.manual_seed(1)
    # Row lengths and what is computed already; blocks in no order.
    spans = [(600, 599), (300, 299), (16, 15), (17, 16), (1, 0), (40, 0), (90, 32), (33, 31), (250, 249), (256, 255)]
    ids = torch.randperm(256).tolist()
    table = RowTable(num_blocks=256, block_size=BLOCK, hidden_size=8)
    rows = [
        added(i, length, [ids.pop() for _ in range(-(-length // BLOCK))], num_computed=done)
        for i, (length, done) in enumerate(spans)
    ]
    step = plan(
        added=rows,
        chunks=[Chunk(i, done, length) for i, (length, done) in enumerate(spans) if length - done > 1],
        decodes=[Decode(i, 1) for i, (length, done) in enumerate(spans) if length - done == 1],
    )
    table.apply(step)
    batch = build_batch(table, step)
    keys, values = torch.randn(2, 2, 257, BLOCK, 8, dtype=torch.float64)
    query = torch.randn(len(batch.token_ids), 4, 8, dtype=torch.float64)
    blocks = [table.tables([row])[0, : row.num_blocks].tolist() for row in batch.rows]
    starts = batch.token_starts.tolist()
    spans_of_queries, positions = list(itertools.pairwise(starts)), batch.starts.tolist()
    expected = paged_attention(query, keys, values, blocks, spans_of_queries, positions, window, chunked=chunked)
    groups = attention_groups.attention_groups(batch, window, 256, BLOCK, torch.device("cpu"), chunked=chunked)
    assert [group.token_end for group in groups[:-1]] == [group.token_start for group in groups[1:]]
    for group in groups:
        part = query[group.token_start : group.token_end].view(group.num_rows, -1, 4, 8)
        gathered = [pages[:, group.table].flatten(2, 3) for pages in (keys, values)]
        got = attention(part, gathered[0], gathered[1], group.mask, group.reach).flatten(0, 1)
        torch.testing.assert_close(got, expected[group.token_start : group.token_end], atol=1e-12, rtol=1e-12)
    decodes = sum(group.num_rows for group in groups if group.token_end - group.token_start == group.num_rows)
    assert decodes == 7
    assert len(groups) < len(spans)


def test_a_sampled_position_reads_the_history_as_it_was_when_its_step_began(table):
    """A stage that chooses the token later finds the place of that token in the history."""
    table.apply(plan(added=[added(0, 3, [1])]))
    row = table[0]
    positions = [SampledPosition(row), SampledPosition(row, [7, 8])]
    row.expect()
    assert [position.tail(4) for position in positions] == [(100, 101, 102), (101, 102, 7, 8)]
    assert [position.tail(1) for position in positions] == [(102,), (8,)]
