"""The CPU library's sampler against the torch one: the same token from the same float32 logits, whatever a row asks."""

import ctypes
import math
import random

import numpy as np
import pytest
from arm.torch_tokens import torch_noise, torch_tokens
from cpu_sampler import Guarded, Sampler, make_row

from penstock.kernels.cpu.bindings import SampledToken, SamplingRow, address
from penstock.scheduler.plan import SamplingParams

DRAWS = 4
"""Tokens of each random row."""


def expected_token(logits, row, mask=None):
    [token_id] = torch_tokens(logits[None], [row], None if mask is None else [mask])
    return token_id


# --------------------------------------------------------------------------------------------------------- random rows


def random_logits(chance, vocab_size, generator):
    kind = chance.choice(["normal", "normal", "sharp", "flat", "ties", "masked", "coarse", "wide"])
    logits = generator.standard_normal(vocab_size).astype(np.float32) * np.float32(chance.choice([0.5, 2, 5]))
    if kind == "sharp":
        logits[generator.integers(vocab_size, size=3)] += np.float32(12)
    elif kind == "flat":
        logits[:] = np.float32(chance.choice([0.0, -3.5]))
    elif kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[generator.integers(vocab_size, size=vocab_size // 2)] = -np.inf
    elif kind == "coarse":
        logits = (logits.view(np.int32) & ~0xFFFF).view(np.float32)
    elif kind == "wide":
        logits *= np.float32(1e3)
    logits[generator.integers(vocab_size)] += np.float32(0.25)
    if not np.isfinite(logits).any():
        logits[0] = 1.0
    return logits


def random_sampling(chance, vocab_size):
    def some(share, value):
        return value() if chance.random() < share else None

    def ids(most):
        return tuple(sorted(chance.sample(range(vocab_size), chance.randint(1, min(most, vocab_size)))))

    changes = {
        "temperature": some(0.9, lambda: chance.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.7, 30.0, 1e-30])),
        "top_k": some(0.4, lambda: chance.choice([1, 2, 5, 50, chance.randint(1, 2 * vocab_size)])),
        "top_p": some(0.4, lambda: chance.choice([0.0, 0.05, 0.5, 0.9, 0.99, 0.9999999, chance.random()])),
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


def compare(table, vocab_size, num_rows, seed):
    """Random rows, a few tokens of each."""
    chance, generator = random.Random(seed), np.random.default_rng(seed)
    rows = [random_row(chance, vocab_size) for _ in range(num_rows)]
    logits = np.stack([random_logits(chance, vocab_size, generator) for _ in rows])
    sampler = Sampler(table, vocab_size)
    for step in range(DRAWS):
        expected = torch_tokens(logits, rows)
        for number, row in enumerate(rows):
            token_id = sampler.sample(logits[number], row)[0]
            assert token_id == expected[number], (seed, step, number, row.sampling, row.history)
            row.append(token_id)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(1, 20), (2, 40), (17, 200), (300, 150), (4096, 30), (151_936, 4)]
)
def test_tokens_are_those_of_the_torch_sampler(table, vocab_size, num_rows):
    compare(table, vocab_size, num_rows, seed=vocab_size)


@pytest.mark.soak
@pytest.mark.parametrize(("vocab_size", "rounds"), [(1, 5), (17, 40), (300, 30), (1000, 30), (4096, 20), (151_936, 2)])
def test_soak_tokens_are_those_of_the_torch_sampler(table, vocab_size, rounds):
    for seed in range(rounds):
        compare(table, vocab_size, 10 if vocab_size > 10_000 else 200, seed=1_000_000 + seed)


@pytest.mark.parametrize("vocab_size", [1, 17, 300, 4096])
def test_entries_that_have_other_tokens_noise(table, vocab_size):
    """As a head draws, whose entries are some of the model's tokens."""
    generator = np.random.default_rng(vocab_size)
    noise_ids = np.zeros(-(-vocab_size // 16) * 16, dtype=np.int32)
    noise_ids[:vocab_size] = generator.permutation(10 * vocab_size)[:vocab_size]
    logits, scratch = Guarded(4 * vocab_size), Guarded(table.sampling_scratch(vocab_size))
    for temperature, top_k in ((0.0, 0), (0.6, 0), (1.0, 0), (1.9, 0), (1.4, 5)):
        values, seed = generator.standard_normal(vocab_size).astype(np.float32), int(generator.integers(1 << 62))
        logits.write(values)
        row = SamplingRow(
            temperature=temperature, top_p=1.0, top_k=top_k, repetition_penalty=1.0, seed=seed, position=70,
            num_logprobs=-1, noise_ids=address(noise_ids),
        )  # fmt: skip
        out = SampledToken()
        table.sample(logits.address, vocab_size, row, scratch.address, out, None, None)
        noise = torch_noise(seed, 70, noise_ids[:vocab_size])
        scores = values / (temperature or 1.0) + noise * (temperature > 0.0)
        if top_k:
            scores[np.argsort(-values)[top_k:]] = -np.inf
        assert out.token_id == scores.argmax()
        assert out.noise == pytest.approx(float(noise[out.token_id]) if temperature else 0.0)


# ------------------------------------------------------------------------------------------------ what chance may miss


def test_sets_that_filters_leave(table):
    """Every token that a filter leaves is drawn, and no other: at a high temperature of logits that hardly differ."""
    logits = np.linspace(0, -1, 40, dtype=np.float32)[np.random.default_rng(1).permutation(40)].copy()
    logits[[3, 9, 30]] = logits[17]  # ties where a filter ends keep the lowest ids
    sampler, order = Sampler(table, 40), np.argsort(-logits, kind="stable")
    probabilities = np.exp(logits[order].astype(np.float64))
    reached = np.cumsum(probabilities / probabilities.sum())
    cut = int(np.flatnonzero(logits[order] == logits[17])[1])
    for sampling, kept in (
        ({"top_k": cut}, cut),
        ({"top_k": cut + 1}, cut + 1),
        ({"top_p": float(reached[cut] - 1e-4)}, cut + 1),
        ({"top_p": float(reached[cut] + 1e-4)}, cut + 2),
        ({"min_p": float(np.exp(logits[17] - logits.max()) * 0.9999)}, int((logits >= logits[17]).sum())),
    ):
        rows = [make_row(SamplingParams(seed=seed, **sampling)) for seed in range(600)]
        assert {sampler.sample(logits, row)[0] for row in rows} == set(order[:kept].tolist()), sampling


def test_penalties_round_as_float32_does(table):
    """A token that is penalised to the very logit of another loses no tie by an operation that was fused."""
    sampler, factor, lowered = Sampler(table, 2), np.float32(1.3), np.float32(0.7)
    for x in -np.random.default_rng(3).random(200, dtype=np.float32):
        penalised = np.float32(x * factor) - lowered
        row = make_row(
            SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7), history=(9, 0), num_prompt=1
        )
        assert sampler.sample(np.array([x, penalised], dtype=np.float32), row)[0] == 0


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["all", "last", "first"])
def test_a_model_that_computes_no_numbers_gets_the_lowest_allowed_token(table, logit, where):
    logits = np.zeros(300, dtype=np.float32)
    logits[{"all": slice(None), "last": slice(299, 300), "first": slice(0, 1)}[where]] = logit
    sampler = Sampler(table, 300)
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1, top_k=3, top_p=0.5, min_p=0.1, frequency_penalty=0.5),
        SamplingParams(seed=1, allowed_token_ids=(4, 7, 299), stop_token_ids=(4,), min_tokens=9, logprobs=3),
    ):
        row = make_row(sampling)
        assert sampler.sample(logits, row)[0] == expected_token(logits, row)


def test_masks_that_leave_nothing_give_way(table):
    logits = np.arange(20, dtype=np.float32)
    sampler = Sampler(table, 20)
    for allowed, stops, words, chosen in (
        ((3, 5), (3,), ((5,),), 5),
        ((3, 5), (3, 5), ((5,), (5,)), 5),
        ((3, 5), (5,), ((7,),), 3),
        (None, tuple(range(20)), ((19,),), 19),
    ):
        sampling = SamplingParams(temperature=0.0, allowed_token_ids=allowed, stop_token_ids=stops, min_tokens=4,
                                  bad_words=words)  # fmt: skip
        assert sampler.sample(logits, make_row(sampling))[0] == chosen


# --------------------------------------------------------------------------------------------------- masks of grammars


def make_mask(allowed, beyond=0):
    """Of booleans; ``beyond`` is what stands in the bits that belong to no token."""
    bits = np.full(-(-len(allowed) // 32) * 32, beyond, dtype=np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def random_mask(chance, vocab_size, generator):
    """A token, a few, half of them, nearly all, all, or long runs, as one group of tokens after another has."""
    kind = chance.choice(["one", "few", "half", "most", "all", "runs"])
    share = {"one": 0.0, "few": 3 / vocab_size, "half": 0.5, "most": 1 - 3 / vocab_size, "all": 1.0}.get(kind, 0.5)
    allowed = generator.random(vocab_size) < share
    if kind == "runs":
        allowed = np.repeat(generator.random(vocab_size) < 0.3, chance.randint(1, 600))[:vocab_size]
    allowed[generator.integers(vocab_size)] = True
    return make_mask(allowed, beyond=chance.randint(0, 1))


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 10), (31, 60), (257, 100), (1000, 100), (4096, 60)])
def test_tokens_are_those_of_the_torch_sampler_under_masks(table, vocab_size, num_rows):
    chance, generator = random.Random(vocab_size), np.random.default_rng(vocab_size)
    rows = [random_row(chance, vocab_size) for _ in range(num_rows)]
    logits = np.stack([random_logits(chance, vocab_size, generator) for _ in rows])
    for broken in logits[::8]:
        broken[generator.integers(vocab_size)] = chance.choice([math.nan, math.inf])
    masks = [random_mask(chance, vocab_size, generator) for _ in rows]
    expected = torch_tokens(logits, rows, masks)
    sampler = Sampler(table, vocab_size)
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        kept = mask.copy()
        token_id = sampler.sample(logits[number], row, mask)[0]
        assert token_id == expected[number], (number, row.sampling, row.history)
        assert mask[token_id // 32] >> (token_id % 32) & 1
        assert (mask == kept).all()


@pytest.mark.parametrize("vocab_size", [1, 32, 300, 1003])
def test_the_one_token_that_a_mask_leaves(table, vocab_size):
    """Whatever the other parameters say, and whatever the model thinks of it."""
    sampler, logits = Sampler(table, vocab_size), np.zeros(vocab_size, dtype=np.float32)
    ways = (
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=tuple(range(vocab_size))),
        SamplingParams(seed=3, top_k=vocab_size - 1, top_p=0.9, bad_words=tuple((i,) for i in range(vocab_size))),
        SamplingParams(seed=3, min_p=0.1, allowed_token_ids=(0,)),
    )
    rows = [make_row(sampling) for sampling in ways]
    for token_id in {*range(0, vocab_size, 7), vocab_size - 1}:
        mask = make_mask(np.arange(vocab_size) == token_id, beyond=1)
        for logit in (0.0, -1e30, -math.inf, math.nan):
            logits[token_id] = logit
            assert [sampler.sample(logits, row, mask)[0] for row in rows] == [token_id] * 3
        logits[:] = math.nan


def test_what_is_forbidden_under_a_mask_gives_way_where_that_leaves_nothing(table):
    logits = np.arange(40, dtype=np.float32)
    sampler = Sampler(table, 40)
    for allowed, stops, chosen in (((3, 35), (35,), 3), ((3, 35), (3, 35), 35), ((3, 35), (39, 3), 35)):
        row = make_row(SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=stops))
        mask = make_mask(np.isin(np.arange(40), allowed))
        assert sampler.sample(logits, row, mask)[0] == chosen
        assert expected_token(logits, row, mask) == chosen


def test_logprobs_under_a_mask_are_the_models_own(table):
    logits = np.random.default_rng(6).standard_normal(700).astype(np.float32)
    sampler, mask = Sampler(table, 700), make_mask(np.isin(np.arange(700), (5, 600)))
    for sampling in (SamplingParams(temperature=0.0, logprobs=7), SamplingParams(logprobs=7, frequency_penalty=0.4)):
        row = make_row(sampling, history=(1, 5, 600), num_prompt=1)
        token_id, logprob, ids, top = sampler.sample(logits, row, mask)
        order, logprobs = ranked(logits, 7)
        assert token_id in (5, 600)
        assert logprob == pytest.approx(logprobs[token_id], abs=1e-5)
        assert ids.tolist() == order.tolist()
        np.testing.assert_allclose(top, logprobs[order], atol=1e-5)


# --------------------------------------------------------------------------------------------------- log-probabilities


def ranked(logits, num_top):
    """Ids by falling logit, equal ones by rising id; and the log-probabilities of all."""
    x = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    return np.argsort(-logits, kind="stable")[:num_top], logprobs


@pytest.mark.parametrize("vocab_size", [1, 17, 300, 4096, 151_936])
def test_logprobs_are_the_models_own(table, vocab_size):
    chance, generator = random.Random(vocab_size), np.random.default_rng(vocab_size)
    sampler = Sampler(table, vocab_size)
    for num_top in (0, 1, 5, 20, 1000, vocab_size, vocab_size + 3):
        logits = random_logits(chance, vocab_size, generator)
        favoured = int(generator.integers(vocab_size))
        row = make_row(SamplingParams(temperature=0.0, logprobs=num_top, logit_bias=((favoured, 9e9),)))
        token_id, logprob, ids, top = sampler.sample(logits, row)
        order, logprobs = ranked(logits, num_top)
        if logits[favoured] > -math.inf:
            assert token_id == favoured
        assert logprob == pytest.approx(logprobs[token_id], abs=1e-5, rel=1e-6)
        assert ids.tolist() == order.tolist()
        np.testing.assert_allclose(top, logprobs[order], atol=1e-5, rtol=1e-6)


def test_no_logprobs_where_none_are_wanted(table):
    _, logprob, ids, top = Sampler(table, 40).sample(np.zeros(40, dtype=np.float32), make_row(SamplingParams()))
    assert (logprob, len(ids), len(top)) == (0.0, 0, 0)


@pytest.mark.parametrize("vocab_size", [1, 40, 4096])
def test_logprobs_of_a_prompt(table, vocab_size):
    logits = np.random.default_rng(2).standard_normal(vocab_size).astype(np.float32)
    own, scratch = Guarded(4 * vocab_size), Guarded(table.sampling_scratch(vocab_size))
    own.write(logits)
    for num_top in (0, 3, vocab_size):
        ids, top, chosen = Guarded(4 * num_top), Guarded(4 * num_top), ctypes.c_float(math.nan)
        num_top = min(num_top, vocab_size)
        table.logprobs(
            own.address, vocab_size, vocab_size // 2, num_top, scratch.address, chosen, ids.address, top.address
        )
        order, logprobs = ranked(logits, num_top)
        assert chosen.value == pytest.approx(logprobs[vocab_size // 2], abs=1e-5)
        assert ids.read(np.int32)[:num_top].tolist() == order.tolist()
        np.testing.assert_allclose(top.read(np.float32)[:num_top], logprobs[order], atol=1e-5)
    assert (own.read(np.float32) == logits).all()
    scratch.read(np.uint8)


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_logprobs_of_no_numbers_are_none(table, logit):
    logits = np.full(300, logit, dtype=np.float32)
    _, logprob, ids, top = Sampler(table, 300).sample(logits, make_row(SamplingParams(logprobs=5)))
    assert math.isnan(logprob)
    assert np.isnan(top).all()
    assert sorted(set(ids.tolist())) == list(range(5))
