"""Recurrent states are saved, copied and advanced as plans say: each row goes on as if it had computed all of its
tokens itself."""

import numpy as np
import pytest

from penstock.models.backends.cpu import model as cpu_model
from penstock.scheduler.plan import NO_SLOT, AddedRow, Chunk, Decode, SamplingParams, StateSnapshot

ON_ALL = pytest.mark.parametrize(
    "backend", ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.soak)], indirect=True
)


@pytest.fixture
def play(typical_hybrid, backend, rows):
    """Rows of each model on each backend."""
    return rows(typical_hybrid.path, backend=backend)


@ON_ALL
def test_a_snapshot_inside_a_chunk_and_at_its_end(typical_hybrid, play, check_greedy, prompt):
    named = [StateSnapshot(0, 16, 5), StateSnapshot(0, 48, 6), StateSnapshot(0, 64, 7)]
    first = play.begin(play.row(0, prompt, slot=0), 40, 48, snapshots=named)
    truth = first.token_ids + play.decode(0, 11)
    check_greedy(typical_hybrid, prompt, truth)
    for number, (at, source) in enumerate(((16, 5), (48, 6), (64, 7)), start=1):
        result = play.begin(play.row(number, prompt, number, source, like=0, at=at))
        assert result.token_ids + play.decode(number, 11) == truth
    # What a snapshot holds stays as it is while rows go on from it.
    result = play.begin(play.row(4, prompt, 4, 5, like=0, at=16))
    assert result.token_ids + play.decode(4, 11) == truth


@ON_ALL
def test_a_snapshot_that_a_decoding_row_passes(typical_hybrid, play, check_greedy, prompt):
    truth = play.begin(play.row(0, prompt, slot=0)).token_ids
    truth += play.decode(0, 20, [StateSnapshot(0, 80, 6)])
    check_greedy(typical_hybrid, prompt, truth)
    longer = prompt + truth[:8]
    result = play.begin(play.row(1, longer, 1, 6, like=0, at=80))
    assert result.token_ids + play.decode(1, 5) == truth[8:14]


@ON_ALL
@pytest.mark.parametrize("num_right", [0, 3, 4, 5, 8])
def test_drafts_around_a_border(typical_hybrid, play, check_greedy, prompt, num_right):
    """The row is at position 75, and the border is at 80. What is saved there is the state of accepted tokens."""
    truth = play.begin(play.row(0, prompt, slot=0)).token_ids + play.decode(0, 24)
    check_greedy(typical_hybrid, prompt, truth)
    play.begin(play.row(1, prompt, slot=1))
    drafts = truth[1:9]
    if num_right < 8:
        drafts[num_right] = (drafts[num_right] + 1) % 160
    result = play.verify(1, drafts, [StateSnapshot(1, 80, 6)])
    assert result.token_ids == truth[1 : num_right + 2]
    assert result.num_computed == 75 + num_right + 1
    rest = play.decode(1, 10)
    assert rest == truth[num_right + 2 : num_right + 12]
    longer = prompt + truth[:9]
    result = play.begin(play.row(2, longer, 2, 6, like=1, at=80))
    assert result.token_ids + play.decode(2, 5) == truth[9:15]


@ON_ALL
def test_rows_with_drafts_chunks_and_single_tokens_in_one_step(typical_hybrid, play, check_greedy, prompt):
    """A row that is dropped gives its slot to another in the same plan."""
    prompts = [prompt, prompt[:31], prompt[5:60], prompt[::-1]]
    answers = []
    for number, tokens in enumerate(prompts[:3]):
        answers.append(play.begin(play.row(number, tokens, slot=number)).token_ids)
    play.begin(play.row(4, prompt[:20], slot=4))
    late = play.row(3, prompts[3], slot=4)
    answers.append([])
    results = play.run(dropped=[4], added=[late], chunks=[Chunk(3, 0, 33)], decodes=[Decode(0, 1)])
    results += play.run(chunks=[Chunk(3, 33, 75)], decodes=[Decode(number, 1) for number in range(3)])
    for result in results:
        answers[result.row] += result.token_ids
    for number, tokens in enumerate(prompts):
        answer = answers[number] + play.decode(number, 6)
        check_greedy(typical_hybrid, tokens, answer)


def added(row=0, slot=0, source=NO_SLOT, num_computed=0):
    return AddedRow(
        row, 0, [1] * 40, 40, num_computed, [0, 1, 2], SamplingParams(), state_slot=slot, state_source=source
    )


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ({"added": [added(slot=NO_SLOT)]}, "no such slot"),
        ({"added": [added(slot=1000)]}, "no such slot"),
        ({"added": [added(source=1000, num_computed=16)]}, "no such state"),
        ({"added": [added(num_computed=16)]}, "another state"),
        ({"added": [added(source=3)]}, "another state"),
        ({"added": [added()], "snapshots": [StateSnapshot(0, 16, 1000)]}, "no such slot"),
        ({"added": [added()], "snapshots": [StateSnapshot(0, 17, 3)]}, "no block that ends"),
        ({"added": [added(source=3, num_computed=16)], "snapshots": [StateSnapshot(0, 16, 3)]}, "has passed position"),
        ({"snapshots": [StateSnapshot(0, 16, 3)]}, "row 0"),
    ],
)
def test_a_plan_that_contradicts_the_states_is_refused(hybrid, rows, lists, says):
    with pytest.raises(AssertionError, match=says):
        rows(hybrid("lfm2").path).run(**lists)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_on_a_cpu_do_not_depend_on_chunks_and_batches(
    typical_hybrid, cpu_library, rows, prompt, dtype, num_threads, monkeypatch
):
    monkeypatch.setattr(cpu_model, "SMALL_STEP", 0)  # all threads, in the smallest of steps

    def logprobs(*ends, threads=1, beside=False):
        play = rows(typical_hybrid.path, backend="cpu", dtype=dtype, num_threads=threads)
        if beside:
            play.begin(play.row(1, prompt[::-1], slot=1))
        result = play.begin(play.row(0, prompt, slot=0), *ends, snapshots=[StateSnapshot(0, 32, 7)])
        told = [result.logprobs.chosen, result.logprobs.top]
        for _ in range(4):
            decodes = [Decode(number, 1) for number in range(1 + beside)]
            [result] = [one for one in play.run(decodes=decodes) if one.row == 0]
            told += [result.logprobs.chosen, result.logprobs.top]
        return np.concatenate(told)

    plain = logprobs()
    assert np.isfinite(plain).all()
    assert (logprobs(1, 2, 30, 31, 70, threads=num_threads, beside=True) == plain).all()
    assert (logprobs(32, 64, threads=num_threads) == plain).all()
