"""What the sampler does to logits before it draws, and that a row's token depends on nothing but the row."""

import math

import pytest
import torch

from penstock.models.backends.torch_common.sampler import sample_positions
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan

VOCAB = 12


def make_row(sampling, history=(1, 2, 3), num_prompt=None):
    table = RowTable(num_blocks=8, block_size=16, hidden_size=8)
    added = AddedRow(0, 0, list(history), num_prompt or len(history), 0, [0], sampling)
    table.apply(StepPlan(0, [], [added], [], [], []))
    return table[0]


def choose(logits, sampling, history=(1, 2, 3), num_prompt=None):
    [sampled] = sample_positions(torch.tensor([logits]), [SampledPosition(make_row(sampling, history, num_prompt))])
    return sampled


def greedy(**changes):
    return SamplingParams(temperature=0.0, **changes)


def falling(**changes):
    """Logits 12, 11, ... with some changed."""
    logits = [float(VOCAB - i) for i in range(VOCAB)]
    for name, value in changes.items():
        logits[int(name.removeprefix("t"))] = value
    return logits


def test_greedy_takes_the_lowest_of_equal_ids():
    assert choose(falling(t4=12.0, t0=3.0, t7=12.0), greedy()).token_id == 4


def test_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    # 12 / 2 falls below 11; prompt tokens count.
    assert choose(falling(), greedy(repetition_penalty=2.0), history=(0,)).token_id == 1
    negative = [-1.0, -1.5] + [-9.0] * 10
    assert choose(negative, greedy(repetition_penalty=2.0), history=(0,)).token_id == 1


def test_presence_and_frequency_count_only_the_output():
    prompt_only = {"history": (0, 0, 0), "num_prompt": 3}
    assert choose(falling(), greedy(presence_penalty=2.0), **prompt_only).token_id == 0
    assert choose(falling(), greedy(frequency_penalty=2.0), **prompt_only).token_id == 0
    output = {"history": (5, 0, 0), "num_prompt": 1}
    assert choose(falling(), greedy(presence_penalty=1.5), **output).token_id == 1
    assert choose(falling(), greedy(frequency_penalty=0.4), **output).token_id == 0
    assert choose(falling(), greedy(frequency_penalty=0.6), **output).token_id == 1


def test_penalties_follow_the_tokens_that_are_appended():
    sampling = greedy(frequency_penalty=0.3)
    row = make_row(sampling)
    chosen = []
    for _ in range(8):
        [sampled] = sample_positions(torch.tensor([falling()]), [SampledPosition(row)])
        row.append(sampled.token_id)
        chosen.append(sampled.token_id)
    # Token 0 falls by 0.3 each time: the fourth time it stands at 11.1, the fifth at 10.8.
    assert chosen == [0, 0, 0, 0, 1, 0, 1, 0]
    rebuilt = make_row(sampling, history=row.history, num_prompt=3)
    assert sorted(zip(rebuilt.counts.ids, rebuilt.counts.output, strict=True)) == sorted(
        zip(row.counts.ids, row.counts.output, strict=True)
    )


def test_penalties_count_any_number_of_distinct_tokens():
    row = make_row(greedy(frequency_penalty=0.3), history=range(1000, 1010), num_prompt=5)
    for token_id in [*range(1000), *range(500)]:
        row.append(token_id)
    counts = dict(zip(row.counts.ids.tolist(), row.counts.output.tolist(), strict=True))
    want = {token_id: 2 if token_id < 500 else 1 for token_id in range(1000)}
    assert counts == want | dict.fromkeys(range(1000, 1005), 0) | dict.fromkeys(range(1005, 1010), 1)


def test_prompt_ids_above_the_tokenizers_vocabulary_are_no_index():
    assert choose(falling(), greedy(repetition_penalty=2.0), history=(VOCAB + 5, 0)).token_id == 1


def test_logit_bias_is_added():
    assert choose(falling(), greedy(logit_bias=((9, 10.0), (0, -1.0)))).token_id == 9


def test_only_allowed_tokens_are_chosen():
    for temperature in (0.0, 5.0):
        sampling = SamplingParams(temperature=temperature, seed=3, allowed_token_ids=(7, 9))
        assert choose(falling(), sampling).token_id in (7, 9)


def test_min_tokens_hold_back_stop_tokens():
    sampling = greedy(min_tokens=2, stop_token_ids=(0, 1))
    assert choose(falling(), sampling, history=(5, 6), num_prompt=1).token_id == 2
    assert choose(falling(), sampling, history=(5, 6, 7), num_prompt=1).token_id == 0


def test_bad_words_mask_their_last_token_where_the_rest_has_come():
    sampling = greedy(bad_words=((0,), (3, 1), (9, 3, 2)))
    assert choose(falling(), sampling, history=(4, 4)).token_id == 1
    assert choose(falling(), sampling, history=(4, 3)).token_id == 2
    assert choose(falling(), sampling, history=(9, 3)).token_id == 3
    assert choose(falling(), greedy(bad_words=((4, 3, 0),)), history=(3,)).token_id == 0


def test_masks_that_leave_nothing_give_way_to_the_allowed_tokens():
    sampling = greedy(allowed_token_ids=(3, 5), min_tokens=5, stop_token_ids=(3,), bad_words=((5,),))
    assert choose(falling(), sampling).token_id == 3


def test_temperature_flattens():
    logits = torch.tensor([[2.0, 0.0]]).expand(4000, -1)
    for temperature, share in ((1.0, 1 / (1 + math.exp(-2))), (4.0, 1 / (1 + math.exp(-0.5)))):
        rows = [make_row(SamplingParams(temperature=temperature, seed=seed)) for seed in range(4000)]
        zeros = sum(
            sampled.token_id == 0
            for sampled in sample_positions(logits.clone(), [SampledPosition(row) for row in rows])
        )
        assert zeros / 4000 == pytest.approx(share, abs=0.03)


def test_the_smallest_temperatures_do_not_overflow():
    logits = falling(t0=3.0e38, t1=-3.0e38)
    assert choose(logits, SamplingParams(temperature=1e-30, seed=1)).token_id == 0


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.2, "min_p": 0.5}]
)
def test_filters_that_leave_one_token(filters):
    assert choose(falling(), SamplingParams(temperature=2.0, seed=9, **filters)).token_id == 0


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_model_that_computes_no_numbers_harms_no_other_row(logit):
    params = SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1, frequency_penalty=0.5, logprobs=1)
    logits = torch.tensor([[logit] * VOCAB, falling(), [1.0, *[logit] * (VOCAB - 1)]])
    rows = [make_row(params) for _ in range(3)]
    broken, whole, half_broken = sample_positions(logits.clone(), [SampledPosition(row) for row in rows])
    assert whole == choose(falling(), params)
    assert broken.token_id == half_broken.token_id == 0


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_computes_no_numbers_gets_the_lowest_allowed_token(logit, temperature):
    params = SamplingParams(temperature=temperature, seed=1, allowed_token_ids=(4, 7), frequency_penalty=0.5)
    assert choose([logit] * VOCAB, params, history=(1, 2, 7), num_prompt=2).token_id == 4


def test_seeds_use_all_64_bits():
    logits = [0.0] * VOCAB
    seeds = [0, 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]
    chosen = [[choose(logits, SamplingParams(seed=seed), (1,) * n).token_id for n in range(1, 20)] for seed in seeds]
    assert len({tuple(ids) for ids in chosen}) == len(seeds)


def test_logprobs_are_the_models_own():
    sampling = greedy(logprobs=2, logit_bias=((5, 50.0),), allowed_token_ids=(5, 6), repetition_penalty=1.5)
    sampled = choose(falling(), sampling, history=(0, 5))
    expected = torch.tensor(falling()).log_softmax(0)
    assert sampled.token_id == 5
    assert sampled.logprobs.chosen == pytest.approx([float(expected[5])])
    assert sampled.logprobs.top_token_ids == [0, 1]
    assert sampled.logprobs.top == pytest.approx(expected[:2].tolist())


def test_logprobs_as_each_row_asks():
    rows = [make_row(greedy(logprobs=logprobs)) for logprobs in (0, None, 3, 99)]
    sampled = sample_positions(torch.tensor([falling()] * 4), [SampledPosition(row) for row in rows])
    assert [s.logprobs and len(s.logprobs.top) for s in sampled] == [0, None, 3, VOCAB]
    assert [s.logprobs.num_top for s in sampled if s.logprobs] == [0, 3, VOCAB]


def test_rows_with_different_parameters_do_not_disturb_each_other():
    generator = torch.Generator().manual_seed(8)
    params = [
        greedy(),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3, temperature=3.0),
        SamplingParams(seed=2, top_p=0.5),
        greedy(logit_bias=((3, 4.0),)),
        SamplingParams(seed=4, min_p=0.2, temperature=0.7, repetition_penalty=1.4),
        SamplingParams(seed=5, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1),
        greedy(allowed_token_ids=(1, 2, 3), logprobs=0),
        SamplingParams(seed=6, temperature=1.3, bad_words=((3, 4), (2,)), min_tokens=9, stop_token_ids=(7,)),
    ] * 3
    logits = torch.randn(len(params), 200, generator=generator, dtype=torch.float64) * 2
    rows = [make_row(p, history=range(i + 1), num_prompt=1) for i, p in enumerate(params)]
    together = sample_positions(logits.clone(), [SampledPosition(row) for row in rows])
    alone = [sample_positions(logits[i : i + 1].clone(), [SampledPosition(row)])[0] for i, row in enumerate(rows)]
    assert together == alone
