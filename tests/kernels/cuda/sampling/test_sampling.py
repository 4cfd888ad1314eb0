"""The CUDA sampler against the torch one: the same token from the same logits, whatever a row asks."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.cuda.sampling.sample import sample
from penstock.kernels.cuda.sampling.tensors import (
    Lines,
    SamplerRows,
    SamplerShape,
    integer_line,
    make_workspace,
    number_line,
)
from penstock.models.backends.torch_common.sampler import sample_positions
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_HISTORY = 64


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_shape(vocab_size, dtype=torch.float32, **small):
    return SamplerShape(
        vocab_size, dtype, vocab_size + 5, MAX_HISTORY, **{"slice": 1024, "bins": 64, "listed": 256, **small}
    )


def make_row(sampling, history=(1, 2, 3), num_prompt=None):
    rows = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    added = AddedRow(0, 0, list(history), num_prompt or len(history), 0, [0], sampling)
    rows.apply(StepPlan(0, [], [added], [], [], []))
    return rows[0]


def tensor(values, dtype):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Batch:
    """Rows of the worker's as the kernels see them, a line each, numbered from the back; spare lines and row 0 are
    garbage."""

    def __init__(self, shape, rows, num_spare=0, num_drafts=0):
        self.shape, self.rows, self._spare, self._num_drafts = shape, rows, num_spare, num_drafts
        num_rows, vocab_size = len(rows) + 1, shape.vocab_size
        self.numbers = [[math.nan] * 8] + [[]] * len(rows)
        self.integers = [[-(1 << 40)] * 8] + [[]] * len(rows)
        self.histories = torch.full((num_rows, MAX_HISTORY), -77, dtype=torch.int32)
        self.counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32)
        self.biases = torch.zeros((num_rows, vocab_size))
        self.masks = torch.zeros((num_rows, shape.mask_words * 32), dtype=torch.int64)
        self.words = [(0,)]
        for index, row in enumerate(rows):
            self._fill(self.number_of(index), row)

    def number_of(self, index):
        return len(self.rows) - index

    def _fill(self, number, row):
        p, vocab_size = row.sampling, self.shape.vocab_size
        self.histories[number, : len(row.history)] = torch.tensor(row.history, dtype=torch.int32)
        if row.counts is not None:
            known = row.counts.ids < vocab_size
            self.counts[number, row.counts.ids[known]] = torch.from_numpy(row.counts.output[known] + 1).int()
        for token_id, bias in p.logit_bias:
            self.biases[number, token_id] = bias
        if p.allowed_token_ids is not None:
            self.masks[number, list(p.allowed_token_ids)] = 1
        first = len(self.words)
        self.words += [(token_id,) for token_id in p.stop_token_ids]
        middle = len(self.words)
        self.words += p.bad_words
        self.numbers[number] = number_line(
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        )
        self.integers[number] = integer_line(
            p.seed,
            p.top_k,
            counts=-1 if row.counts is None else number,
            biases=number if p.logit_bias else -1,
            free_from=row.num_prompt_tokens + p.min_tokens,
            words=(first, middle, len(self.words)),
        )

    def device_rows(self):
        starts = np.cumsum([0, *(len(word) for word in self.words)])
        return SamplerRows(
            tensor(self.numbers, torch.float64),
            tensor(self.integers, torch.int64),
            self.histories.to(DEVICE),
            self.counts.to(DEVICE),
            self.biases.to(DEVICE),
            tensor(starts.tolist(), torch.int32),
            tensor([token_id for word in self.words for token_id in word], torch.int32),
        )

    def lines(self):
        spare = [1 << 30] * self._spare
        masked = [row.sampling.allowed_token_ids is not None for row in self.rows]
        numbers = [self.number_of(index) for index in range(len(self.rows))]
        bits = self.masks.view(len(self.masks), -1, 32) << torch.arange(32)
        return Lines(
            tensor([len(self.rows)], torch.int32),
            tensor([*numbers, *spare], torch.int32),
            tensor([*(len(row.history) for row in self.rows), *spare], torch.int32),
            tensor([self._num_drafts] * len(self.rows) + spare, torch.int32),
            tensor([n if mask else -1 for n, mask in zip(numbers, masked, strict=True)] + spare, torch.int32),
            bits.sum(-1).int().to(DEVICE),
        )

    def sample(self, logits):
        num_sampled = len(self.rows) + self._spare
        padded = torch.full((num_sampled, self.shape.stride), math.nan, dtype=self.shape.dtype, device=DEVICE)
        padded[: len(self.rows), : self.shape.vocab_size] = logits
        token_ids = tensor([-5] * num_sampled, torch.int32)
        self.room = make_workspace(self.shape, num_sampled, DEVICE)
        for part in self.room.values():
            part.view(torch.uint8).fill_(0xA7)
        sample(self.shape, padded, self.device_rows(), self.lines(), self.room, token_ids)
        assert token_ids[len(self.rows) :].tolist() == [-5] * self._spare
        return token_ids[: len(self.rows)].tolist()


def expected_tokens(logits, rows):
    return [
        sampled.token_id for sampled in sample_positions(logits.float().clone(), [SampledPosition(row) for row in rows])
    ]


# --------------------------------------------------------------------------------------------------------- random rows


def random_logits(chance, vocab_size, generator):
    kind = chance.choice(["normal", "normal", "sharp", "flat", "ties", "masked", "coarse", "wide"])
    logits = torch.randn(vocab_size, generator=generator) * chance.choice([0.5, 2, 5])
    if kind == "sharp":
        logits[torch.randint(vocab_size, (3,), generator=generator)] += 12
    elif kind == "flat":
        logits[:] = chance.choice([0.0, -3.5])
    elif kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.randint(vocab_size, (vocab_size // 2,), generator=generator)] = -math.inf
    elif kind == "coarse":
        logits = logits.bfloat16().float()
    elif kind == "wide":
        logits *= 1e3
    logits[int(torch.randint(vocab_size, (), generator=generator))] += 0.25
    if not torch.isfinite(logits).any():
        logits[0] = 1.0
    return logits


def random_sampling(chance, vocab_size):
    def some(share, value):
        return value() if chance.random() < share else None

    def ids(most):
        return tuple(sorted(chance.sample(range(vocab_size), chance.randint(1, min(most, vocab_size)))))

    changes = {
        "temperature": some(0.9, lambda: chance.choice([0.0, 0.3, 0.7, 1.0, 1.7, 30.0, 1e-30])),
        "top_k": some(0.4, lambda: chance.choice([1, 2, 5, 50, chance.randint(1, 2 * vocab_size)])),
        "top_p": some(0.4, lambda: chance.choice([0.0, 1e-6, 0.05, 0.5, 0.9, 0.99, 0.9999999, chance.random()])),
        "min_p": some(0.3, lambda: chance.choice([1e-4, 0.02, 0.5, 1.0, chance.random()])),
        "repetition_penalty": some(0.3, lambda: chance.uniform(0.5, 2.0)),
        "presence_penalty": some(0.3, lambda: chance.uniform(-2, 2)),
        "frequency_penalty": some(0.3, lambda: chance.uniform(-2, 2)),
        "min_tokens": some(0.3, lambda: chance.randint(0, 8)),
        "stop_token_ids": some(0.5, lambda: ids(3)),
        "logit_bias": some(0.3, lambda: tuple((i, chance.uniform(-30, 30)) for i in ids(9))),
        "allowed_token_ids": some(0.2, lambda: ids(chance.choice([1, 3, 500]))),
        "bad_words": some(0.3, lambda: tuple(ids(3) for _ in range(chance.randint(1, 3)))),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return SamplingParams(seed=chance.getrandbits(64), **given)


def random_row(chance, vocab_size):
    # Ids from beyond the vocabulary, which a prompt may hold, are no index.
    history = [chance.randrange(vocab_size + 2) for _ in range(chance.randint(1, 40))]
    return make_row(random_sampling(chance, vocab_size), history, chance.randint(1, len(history)))


def compare(shape, num_rows, seed):
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [random_row(chance, shape.vocab_size) for _ in range(num_rows)]
    logits = torch.stack([random_logits(chance, shape.vocab_size, generator) for _ in rows]).to(shape.dtype)
    tokens = Batch(shape, rows, num_spare=1).sample(logits)
    for row, token, expected in zip(rows, tokens, expected_tokens(logits, rows), strict=True):
        assert token == expected, (row.sampling, row.history)


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 6), (2, 10), (17, 20), (300, 20)])
def test_tokens_are_those_of_the_torch_sampler(vocab_size, num_rows):
    compare(make_shape(vocab_size), num_rows, seed=vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_and_lists_that_overflow_change_no_token(dtype):
    compare(make_shape(1237, dtype, slice=512, bins=16, listed=16), 8, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
def test_tokens_of_real_vocabularies(vocab_size):
    for seed in range(5):
        compare(SamplerShape(vocab_size, torch.bfloat16, vocab_size + 16, MAX_HISTORY), 64, seed)


# ------------------------------------------------------------------------------------------------ what chance may miss


def test_sets_that_filters_leave():
    """The threshold of a line tells the set: that of a plain sort."""
    logits = torch.linspace(0, -1, 40)[torch.randperm(40)]
    logits[[3, 9, 30]] = logits[17].clone()  # ties where a filter ends keep the lowest ids
    order = sorted(range(40), key=lambda i: (-float(logits[i]), i))
    reached = logits[order].double().softmax(0).cumsum(0)
    cut = [float(logits[i]) for i in order].index(float(logits[17])) + 1
    wanted: list[tuple[dict[str, Any], int]] = [
        ({"top_k": cut}, cut),
        ({"top_k": cut + 1}, cut + 1),
        ({"top_k": 40}, 40),
        ({"top_p": float(reached[cut] - 1e-4)}, cut + 1),
        ({"top_p": float(reached[cut] + 1e-4)}, cut + 2),
        ({"top_k": cut + 1, "top_p": float((reached[cut] - 1e-4) / reached[cut])}, cut + 1),
        ({"top_k": cut + 1, "top_p": float((reached[cut - 1] + 1e-4) / reached[cut])}, cut + 1),
        ({"top_k": cut + 1, "top_p": float((reached[cut - 1] - 1e-4) / reached[cut])}, cut),
        ({"top_p": 0.0}, 1),
    ]
    # A short list is none: the whole line is searched, slice by slice, which takes long.
    for listed, size_of_slice, cases in ((64, 64, wanted), (4, 16, wanted[::2])):
        rows = [make_row(SamplingParams(**sampling)) for sampling, _ in cases]
        batch = Batch(make_shape(40, slice=size_of_slice, bins=16, listed=listed), rows)
        batch.sample(logits.expand(len(rows), -1))
        thresholds = batch.room["thresholds"].tolist()
        for (sampling, size), threshold in zip(cases, thresholds, strict=True):
            score = (logits - logits.max()).numpy().view(np.int32).astype(np.int64) & 0x7FFFFFFF
            keys = ((0x7FFFFFFF - score) << 20) | (0xFFFFF - np.arange(40))
            assert set(np.flatnonzero(keys >= threshold)) == set(order[:size]), (listed, sampling)


def test_edges():
    """What leaves one token, by whatever parameter, gives it; and broken logits the lowest token that is allowed."""
    vocab_size = 1237
    logits = torch.randn(14, vocab_size)
    logits[:, 700] = 9.0
    logits[9, 5] = math.nan
    logits[10] = math.inf
    logits[11] = -math.inf
    logits[12, [4, 7]] = torch.tensor([math.nan, 100.0])
    everything = tuple(range(vocab_size))
    all_but_one = everything[:33] + everything[34:]
    expected = [
        (SamplingParams(temperature=0.0), 700),
        (SamplingParams(top_k=1), 700),
        (SamplingParams(top_p=1e-9), 700),
        (SamplingParams(min_p=1.0), 700),
        (SamplingParams(temperature=1e-30, seed=5), 700),
        (SamplingParams(allowed_token_ids=(1236,)), 1236),
        (SamplingParams(min_tokens=1, stop_token_ids=all_but_one), 33),
        (SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=everything), 700),
        (SamplingParams(temperature=0.0, allowed_token_ids=(3, 5), stop_token_ids=(3,), min_tokens=1,
                        bad_words=((2, 3, 5), (5, 3, 5)), logit_bias=((3, 100.0),)), 3),
        (SamplingParams(temperature=0.0), 0),
        (SamplingParams(allowed_token_ids=(4, 7), top_p=0.5), 4),
        (SamplingParams(allowed_token_ids=(1201, 1236), top_k=3), 1201),
        # What is masked may be broken.
        (SamplingParams(allowed_token_ids=(7, 8, 9), top_k=1), 7),
        (SamplingParams(temperature=0.0, bad_words=((2, 3, 700), (1, 2, 3, 12)),
                        logit_bias=((12, 90.0), (14, 80.0))), 14),
    ]  # fmt: skip
    rows = [make_row(sampling) for sampling, _ in expected]
    assert expected_tokens(logits, rows) == [token_id for _, token_id in expected]
    assert Batch(make_shape(vocab_size, slice=2048), rows).sample(logits) == [token_id for _, token_id in expected]


def test_penalties_round_as_float32_does():
    """A token that is penalised to the very logit of another loses no tie by an operation that was fused."""
    factor, lowered = torch.tensor(1.3), torch.tensor(0.7)
    x = -torch.rand(12)
    logits = torch.stack([x, x * factor - lowered], dim=1)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7)
    rows = [make_row(sampling, history=(9, 0), num_prompt=1) for _ in x]
    assert Batch(make_shape(2, slice=16), rows).sample(logits) == [0] * len(x)


def test_a_token_depends_only_on_its_own_line():
    chance = random.Random(8)
    rows = [random_row(chance, 300) for _ in range(6)]
    logits = torch.randn(len(rows), 300) * 3
    shape = make_shape(300, slice=128)
    together, alone = Batch(shape, rows, num_spare=1), [Batch(shape, [row]) for row in rows]
    tokens = together.sample(logits)
    for index, batch in enumerate(alone):
        assert batch.sample(logits[index : index + 1]) == [tokens[index]]
        assert batch.room["thresholds"][0] == together.room["thresholds"][index]
        if rows[index].sampling.temperature > 0:
            assert torch.equal(batch.room["drawn"][0], together.room["drawn"][index])


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_count_as_output(num_drafts):
    """A line behind drafts samples as a row does whose output they are."""
    chance = random.Random(num_drafts)
    rows, logits = [], torch.randn(6, 50)
    for _ in logits:
        sampling = SamplingParams(seed=chance.getrandbits(64), repetition_penalty=1.4, frequency_penalty=0.9,
                                  presence_penalty=-0.5, bad_words=((3,), (1, 2), (4, 4)))  # fmt: skip
        rows.append(make_row(sampling, [chance.randrange(5) for _ in range(9)], 5))
    batch = Batch(make_shape(50, slice=64), rows, num_drafts=num_drafts)
    for index, row in enumerate(rows):
        for _ in range(num_drafts):
            row.append(chance.randrange(5))
            batch.histories[batch.number_of(index), len(row.history) - 1] = row.history[-1]
    assert batch.sample(logits) == expected_tokens(logits, rows)


@pytest.mark.gpu
def test_a_graph_samples_from_its_inputs_at_replay():
    chance = random.Random(8)
    shape = SamplerShape(32_000, torch.bfloat16, 32_000, MAX_HISTORY)
    rows = [random_row(chance, shape.vocab_size) for _ in range(20)]
    batch = Batch(shape, rows)
    batch.sample(torch.randn(20, shape.vocab_size))  # compiles
    logits = torch.randn(20, shape.vocab_size, device=DEVICE).to(shape.dtype)
    tokens = tensor([0] * 20, torch.int32)
    on_device, lines, room = batch.device_rows(), batch.lines(), make_workspace(shape, 20, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(shape, logits, on_device, lines, room, tokens)
    for _ in range(3):
        logits.copy_(torch.randn(20, shape.vocab_size))
        graph.replay()
        expected = expected_tokens(logits.cpu(), rows)
        assert tokens.tolist() == expected
