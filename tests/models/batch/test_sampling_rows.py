"""Rows as the CPU library sees them: what is filled once, what changes, and that nothing is read after it was freed."""

import ctypes
import gc
import subprocess
import sys

import pytest

from penstock.kernels.cpu.bindings import SamplingRow
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan


class Rows:
    """A worker's rows, and the batches of them."""

    def __init__(self):
        self.table = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
        self.sampling = SamplingRows()

    def add(self, number, sampling, history=(1, 2, 3), num_prompt=None, epoch=0):
        dropped = [number] if number in self.table._rows else []
        added = AddedRow(number, epoch, list(history), num_prompt or len(history), 0, [0], sampling)
        self.table.apply(StepPlan(0, dropped, [added], [], [], []))
        return self.table[number]

    def gather(self, *numbers):
        batch = self.sampling.gather([SampledPosition(self.table[number]) for number in numbers])
        return batch, (SamplingRow * len(batch.rows)).from_address(batch.address)


def longs(address, count):
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


def seen(line):
    return dict(zip(longs(line.seen_ids, line.num_seen), longs(line.seen_counts, line.num_seen), strict=True))


def forbidden(line):
    return longs(line.forbidden, line.num_forbidden)


@pytest.fixture
def rows():
    return Rows()


def test_every_parameter_arrives(rows):
    sampling = SamplingParams(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=-0.3, seed=(1 << 64) - 5, logit_bias=((4, 1.5), (9, -2.5)), allowed_token_ids=(4, 5, 9),
        logprobs=3, min_tokens=2, stop_token_ids=(7,), bad_words=((5, 3, 8), (3, 6), (2, 1)),
    )  # fmt: skip
    rows.add(0, sampling, history=(9, 5, 3), num_prompt=2)
    batch, [line] = rows.gather(0)
    assert (line.temperature, line.top_p, line.min_p) == (0.7, 0.9, 0.05)
    assert (line.repetition_penalty, line.presence_penalty, line.frequency_penalty) == (1.1, 0.2, -0.3)
    assert (line.seed, line.position, line.top_k, line.num_logprobs) == ((1 << 64) - 5, 3, 40, 3)
    assert seen(line) == {9: 0, 5: 0, 3: 1}
    assert longs(line.bias_ids, line.num_biases) == [4, 9]
    assert list((ctypes.c_double * 2).from_address(line.biases)) == [1.5, -2.5]
    assert longs(line.allowed, line.num_allowed) == [4, 5, 9]
    assert forbidden(line) == [7, 8, 6]
    assert (len(batch.rows), batch.num_top) == (1, 3)


def test_a_plain_row_points_to_nothing(rows):
    rows.add(0, SamplingParams())
    batch, [line] = rows.gather(0)
    assert (line.num_seen, line.num_biases, line.allowed, line.num_allowed, line.num_forbidden) == (0, 0, None, 0, 0)
    assert (line.temperature, line.top_p, line.repetition_penalty, line.num_logprobs) == (1.0, 1.0, 1.0, -1)
    assert batch.num_top == 0


def test_no_rows(rows):
    batch = rows.sampling.gather([])
    assert (len(batch.rows), batch.num_top) == (0, 0)


def test_rows_stand_in_the_order_of_the_call(rows):
    for number in (0, 1, 40, 300):
        rows.add(number, SamplingParams(seed=number, logprobs=number % 7 or None), history=range(1, 2 + number))
    batch, lines = rows.gather(300, 0, 40, 1)
    assert [(line.seed, line.position) for line in lines] == [(300, 301), (0, 1), (40, 41), (1, 2)]
    assert [line.num_logprobs for line in lines] == [6, -1, 5, 1]
    assert batch.num_top == 6


def test_a_batch_is_as_its_rows_stood(rows):
    """A later batch does not write into an earlier one, which a step may still read."""
    row = rows.add(0, SamplingParams(min_tokens=2, stop_token_ids=(7, 8)))
    first, [before] = rows.gather(0)
    for token_id in (5, 6):
        row.append(token_id)
    _second, [after] = rows.gather(0)
    assert (before.position, forbidden(before)) == (3, [7, 8])
    assert (after.position, forbidden(after)) == (5, [])
    assert len(first.rows) == 1


def test_counts_that_move_are_followed(rows):
    row = rows.add(0, SamplingParams(frequency_penalty=0.5))
    for token_id in range(1000, 2000):
        row.append(token_id)
        row.append(1000)
        if token_id % 7 == 0 or token_id == 1999:
            gc.collect(0)
            _batch, [line] = rows.gather(0)
            assert line.num_seen == token_id - 1000 + 1 + 3
            assert seen(line)[1000] == token_id - 1000 + 2
    assert len(seen(line)) == 1003


def test_arrays_live_as_long_as_their_batch(rows):
    sampling = SamplingParams(
        bad_words=((3,),),
        min_tokens=9,
        stop_token_ids=(6,),
        allowed_token_ids=tuple(range(5000)),
        frequency_penalty=1.0,
    )
    row = rows.add(0, sampling)
    batch, [line] = rows.gather(0)
    for token_id in range(5000):
        row.append(token_id)
    rows.add(0, SamplingParams(), epoch=1)
    rows.gather(0)
    del row
    gc.collect()
    [list(range(1000 + i)) for i in range(200)]  # takes what was freed
    assert forbidden(line) == [6, 3]
    assert longs(line.allowed, line.num_allowed) == list(range(5000))
    assert longs(line.seen_ids, line.num_seen) == [1, 2, 3]
    assert len(batch.rows) == 1


def test_another_row_of_the_same_number_takes_its_place(rows):
    restrained = SamplingParams(
        seed=1, temperature=0.0, presence_penalty=1.0, bad_words=((3,),), allowed_token_ids=(1, 2), logprobs=4
    )
    rows.add(0, restrained)
    _, [line] = rows.gather(0)
    assert (line.seed, forbidden(line), line.num_allowed) == (1, [3], 2)
    rows.add(0, SamplingParams(seed=2), epoch=1)
    batch, [line] = rows.gather(0)
    assert (line.seed, line.temperature, line.num_seen, line.num_forbidden, line.allowed) == (2, 1.0, 0, 0, None)
    assert batch.num_top == 0
    rows.add(0, restrained, history=(4, 5), epoch=2)
    _, [line] = rows.gather(0)
    assert (seen(line), forbidden(line), line.num_allowed) == ({4: 0, 5: 0}, [3], 2)


def test_torch_is_not_needed():
    code = "import sys, penstock.models.backends.cpu.sampling; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
