"""A step's beginning and end, against lists of numbers. All of it is integers: compared is for equality."""

import random

import pytest
import torch

from penstock.kernels.cuda.step import DeviceRows, StepTensors, commit, prepare
from penstock.kernels.reference import fused as reference_cuda

PAGE_SLOTS = 16
VOCAB = 1000
MAX_HISTORY = 59


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def make_rows(tables, lengths, next_tokens, device):
    """Histories are a little shorter than what the tables could hold."""
    histories = torch.full((len(lengths), MAX_HISTORY), -7, dtype=torch.int32, device=device)
    return DeviceRows(ints(tables, device), ints(lengths, device), ints(next_tokens, device), histories)


def make_step(rows, num_queries, given, device):
    """With all that is made poisoned."""
    sequences, tokens = len(rows), len(given)
    return StepTensors(
        rows=ints(rows, device),
        num_queries=ints(num_queries, device),
        given=ints(given, device),
        token_ids=torch.full((tokens,), -7, dtype=torch.int32, device=device),
        positions=torch.full((tokens,), -7, dtype=torch.int32, device=device),
        slots=torch.full((tokens,), -7, dtype=torch.int64, device=device),
        query_starts=torch.full((sequences + 1,), -7, dtype=torch.int32, device=device),
        contexts=torch.full((sequences,), -7, dtype=torch.int32, device=device),
    )


def check_prepare(case, device):
    rows, num_queries, given, tables, lengths, next_tokens = case
    step, state = make_step(rows, num_queries, given, device), make_rows(tables, lengths, next_tokens, device)
    prepare(state, step, PAGE_SLOTS, VOCAB)
    expected = reference_cuda.prepare(rows, num_queries, given, tables, lengths, next_tokens, PAGE_SLOTS, VOCAB)
    made = (step.token_ids, step.positions, step.slots, step.query_starts, step.contexts)
    for name, have, want in zip(("ids", "positions", "slots", "starts", "contexts"), made, expected, strict=True):
        assert have.tolist() == want, name
    histories = [[-7] * MAX_HISTORY for _ in lengths]
    token_ids = iter(expected[0])
    for row, count in zip(rows, num_queries, strict=True):
        for position in range(lengths[row], lengths[row] + count):
            histories[row][position : position + 1] = [next(token_ids)][: max(0, MAX_HISTORY - position)]
    assert state.histories.tolist() == histories


def random_case(num_rows, num_sequences, num_padding, max_queries, max_pages, seed):
    """Rows that decode, verify drafts and compute prompts, in any order, and buffers that are longer."""
    numbers = random.Random(seed)
    pages = iter(numbers.sample(range(num_rows * max_pages), num_rows * max_pages))
    tables = [[next(pages) for _ in range(max_pages)] for _ in range(num_rows)]
    lengths = [numbers.randrange(max_pages * PAGE_SLOTS - max_queries) for _ in range(num_rows)]
    next_tokens = [numbers.randrange(VOCAB) for _ in range(num_rows)]
    rows = numbers.sample(range(num_rows), num_sequences)
    num_queries = [numbers.choice([1, 1, numbers.randint(1, max_queries)]) for _ in rows]
    given = [numbers.choice([-1, numbers.randrange(VOCAB)]) for _ in range(sum(num_queries) + num_padding)]
    padding = [0] * num_padding
    return rows + padding, num_queries + padding, given, tables, lengths, next_tokens


@pytest.mark.parametrize("seed", range(5))
def test_prepare(seed, device):
    check_prepare(random_case(9, 6, seed, 40, 5, seed), device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sequences", [1, 256, 257, 1000])
@pytest.mark.parametrize("max_queries", [1, 17, 100])
def test_prepare_at_size(max_queries, num_sequences, device):
    check_prepare(random_case(1024, num_sequences, 24, max_queries, 30, 0), device)


def test_a_step_of_one_decoding_row(device):
    step = make_step([3], [1], [-1], device)
    prepare(make_rows([[9, 9]] * 3 + [[4, 2]], [0, 0, 0, 17], [0, 0, 0, 5], device), step, PAGE_SLOTS, VOCAB)
    assert step.token_ids.tolist() == [5]
    assert step.positions.tolist() == [17]
    assert step.slots.tolist() == [2 * PAGE_SLOTS + 1]
    assert step.query_starts.tolist() == [0, 1]
    assert step.contexts.tolist() == [18]


def test_a_step_of_nothing(device):
    step = make_step([0, 0], [0, 0], [5, -1, 5], device)
    prepare(make_rows([[1]], [3], [8], device), step, PAGE_SLOTS, VOCAB)
    assert step.token_ids.tolist() == step.positions.tolist() == [0, 0, 0]
    assert step.slots.tolist() == [-1, -1, -1]
    assert step.query_starts.tolist() == [0, 0, 0]
    assert step.contexts.tolist() == [0, 0]


def test_what_a_row_has_no_page_for_is_stored_nowhere(device):
    check_prepare(([0, 1], [4, 3], [1] * 7, [[7, 5], [3, -1]], [30, 15], [0, 0]), device)
    step = make_step([0, 1], [4, 3], [1] * 7, device)
    prepare(make_rows([[7, 5], [3, -1]], [30, 15], [0, 0], device), step, PAGE_SLOTS, VOCAB)
    assert step.slots.tolist() == [5 * 16 + 14, 5 * 16 + 15, -1, -1, 3 * 16 + 15, -1, -1]
    assert step.positions.tolist() == [30, 31, 31, 31, 15, 16, 17]
    assert step.contexts.tolist() == [32, 18]


def test_token_ids_lie_in_the_vocabulary(device):
    step = make_step([0], [3], [VOCAB + 7, -1, VOCAB - 1], device)
    prepare(make_rows([[0]], [0], [-5], device), step, PAGE_SLOTS, VOCAB)
    assert step.token_ids.tolist() == [VOCAB - 1, 0, VOCAB - 1]


def check_commit(rows, num_kept, sampled, lengths, next_tokens, device):
    state = make_rows([[0]] * len(lengths), lengths, next_tokens, device)
    step = make_step(rows, num_kept, [0], device)
    commit(state, step, step.num_queries, ints(sampled, device))
    reference_cuda.commit(rows, num_kept, sampled, lengths, next_tokens)
    assert state.lengths.tolist() == lengths
    assert state.next_tokens.tolist() == next_tokens


def test_commit(device):
    check_commit([4, 0, 2, 3, 0], [1, 40, 3, 1, 0], [8, -1, 9, 0, 77], [5, 6, 7, 8, 9], [50, 60, 70, 80, 90], device)


@pytest.mark.parametrize("num_rows", [255, 257, 600])
def test_commit_of_many_rows(num_rows, device):
    numbers = random.Random(num_rows)
    rows = numbers.sample(range(1000), num_rows)
    num_kept, sampled = [numbers.randrange(3) for _ in rows], [numbers.randrange(-1, VOCAB) for _ in rows]
    check_commit(rows, num_kept, sampled, [numbers.randrange(99) for _ in range(1000)], [1] * 1000, device)


def test_a_sampled_token_is_the_next_step_s(device):
    state = make_rows([[1, 2]], [16], [3], device)
    step = make_step([0], [1], [-1], device)
    seen = []
    for token in (10, 11):
        prepare(state, step, PAGE_SLOTS, VOCAB)
        seen.append((step.token_ids.tolist(), step.slots.tolist()))
        commit(state, step, step.num_queries, ints([token], device))
    assert seen == [([3], [32]), ([10], [33])]
    assert (state.lengths.tolist(), state.next_tokens.tolist()) == ([18], [11])


def test_what_does_not_fit_is_refused(device):
    state, step = make_rows([[0]], [0], [0], device), make_step([0], [1], [-1], device)
    with pytest.raises(AssertionError):
        commit(state, step, step.num_queries, step.slots)
    with pytest.raises(AssertionError):
        prepare(state, StepTensors(**{**vars(step), "slots": step.given}), PAGE_SLOTS, VOCAB)
