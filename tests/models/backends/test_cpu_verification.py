"""Drafts on the backend for CPUs: each position gets the bits that it gets alone. And masks, made while layers run."""

from concurrent.futures import Future
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from engines import Eager

from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu import model as cpu_model
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.batch.batch import build_batch
from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import RowTable
from penstock.models.batch.sampled_positions import GrammarBitmasks
from penstock.models.speculative.drafter import Drafter, Proposal
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan

pytestmark = pytest.mark.usefixtures("cpu_library")

BLOCK = 16
CONTEXTS = (1, 15, 16, 17, 240, 255, 256, 300, 511, 1022, 4089, 4097)
"""Prompts that end before and behind the ends of pages and of the pieces in which long contexts are read."""
NUM_TOKENS = 24
NUM_BLOCKS = sum(-(-(context + 2 * NUM_TOKENS) // BLOCK) for context in CONTEXTS)
VOCAB_SIZE = 1003
ODD = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 144,
    "intermediate_size": 250,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 40,
    "max_position_embeddings": 4352,
}
"""Sizes that fill neither panels nor groups."""
WAYS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(logprobs=2, top_p=0.9, top_k=40),
    SamplingParams(logprobs=2, repetition_penalty=1.2, frequency_penalty=0.1, min_tokens=9, stop_token_ids=(3, 9)),
)
FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


WINDOWS = {
    "vocab_size": VOCAB_SIZE,
    "head_dim": 16,
    "sliding_window": 24,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "max_position_embeddings": 4352,
}
"""Layers by turns see little and all."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, build_model):
    return build_model(tmp_path_factory.mktemp("long"), "Qwen3Config", ODD)


@pytest.fixture
def make_runner(worker_config, monkeypatch):
    """A runner that uses all its threads in the smallest of steps."""
    monkeypatch.setattr(cpu_model, "SMALL_STEP", 0)

    def make(model, drafter=None, **config):
        backend = load_backend(worker_config(model.path, NUM_BLOCKS, backend="cpu", **config))
        return Runner(backend, drafter and Eager(drafter, NUM_TOKENS))

    return make


Told = dict[int, tuple[list[int], list[float], list[tuple[int, float]]]]
"""By row: its tokens, their log-probabilities, and the likeliest tokens with theirs."""


class HalfKnowing(Drafter):
    """Knows each row's answer, but errs in one token of five."""

    def __init__(self, answers):
        self._answers = answers
        self._rng = np.random.default_rng(7)

    def propose(self, wanted):
        return [self._draft(one.row, one.max_drafts) for one in wanted]

    def _draft(self, row, most):
        told = self._answers[row.number][0]
        begin = len(row.history) - row.num_prompt_tokens
        right = told[begin : begin + int(self._rng.integers(most + 1))]
        drafts = [(token + 1) % VOCAB_SIZE if self._rng.random() < 0.2 else token for token in right]
        return Proposal(drafts, [1.0] * len(drafts))

    def drop_row(self, row):
        pass


def added_rows():
    """A row of each context, with a way of its own to choose."""
    rng = np.random.default_rng(5)
    blocks = rng.permutation(NUM_BLOCKS).tolist()
    rows = []
    for number, context in enumerate(CONTEXTS):
        num_blocks = -(-(context + 2 * NUM_TOKENS) // BLOCK)
        sampling = msgspec.structs.replace(WAYS[number % len(WAYS)], seed=number)
        prompt = rng.integers(VOCAB_SIZE, size=context).tolist()
        rows.append(AddedRow(number, 0, prompt, context, 0, blocks[:num_blocks], sampling, max_drafts=NUM_TOKENS))
        blocks = blocks[num_blocks:]
    return rows


def answers_of(runner, max_drafts):
    """Each row's tokens with their log-probabilities, to the last bit; and how many drafts came true, and did not.
    The last row begins when the others are decoded."""
    *rows, late = added_rows()
    first = StepPlan(0, [], rows, [], [Chunk(row.row, 0, len(row.token_ids)) for row in rows], [])
    told: Told = {row.row: ([], [], []) for row in [*rows, late]}
    results, accepted, refused = [runner.run(first)], 0, 0
    added, chunks = [late], [Chunk(late.row, 0, len(late.token_ids))]
    while any(len(tokens) < NUM_TOKENS for tokens, _, _ in told.values()):
        for result in results.pop().rows:
            tokens, chosen, tops = told[result.row]
            tokens += result.token_ids
            chosen += result.logprobs.chosen
            tops += zip(result.logprobs.top_token_ids, result.logprobs.top, strict=True)
            accepted += len(result.token_ids) - 1
            refused += result.num_drafted - len(result.token_ids) + 1
        decodes = [Decode(row, 1 + max_drafts) for row, (tokens, _, _) in told.items() if 0 < len(tokens) < NUM_TOKENS]
        results.append(runner.run(StepPlan(0, [], added, [], chunks, decodes, max_drafts=max_drafts * len(decodes))))
        added, chunks = [], []
    cut = {row: (t[:NUM_TOKENS], c[:NUM_TOKENS], p[: 2 * NUM_TOKENS]) for row, (t, c, p) in told.items()}
    return cut, accepted, refused


@pytest.mark.parametrize("format", list(FORMATS))
def test_verified_tokens_are_those_of_plain_steps(long_model, make_runner, format):
    check_verified(long_model, make_runner, FORMATS[format])


def test_verified_tokens_of_a_model_with_windows(tmp_path, build_model, make_runner):
    check_verified(build_model(tmp_path, "Gemma2Config", WINDOWS), make_runner, FORMATS["bfloat16"])


def check_verified(model, make_runner, config):
    plain, accepted, refused = answers_of(make_runner(model, **config), 0)
    assert (accepted, refused) == (0, 0)
    assert len({tuple(tokens) for tokens, _, _ in plain.values()}) == len(CONTEXTS)
    for max_drafts, num_threads in ((4, 1), (20, 3)):
        runner = make_runner(model, HalfKnowing(plain), num_threads=num_threads, **config)
        verified, accepted, refused = answers_of(runner, max_drafts)
        assert verified == plain
        assert min(accepted, refused) > 12


# ---------------------------------------------------------------------------------------------------------------- masks


class Awaited(Future[Words]):
    """Notes where the backend's time had gone when it asked."""

    def __init__(self, backend):
        super().__init__()
        self._backend = backend

    def result(self, timeout=None):
        self.seconds = self._backend.seconds()
        return super().result(timeout)


def allow(token_ids):
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def test_masks_are_awaited_between_the_layers_and_the_choice(long_model, worker_config):
    """Of more lines than the head takes at once; those without a mask, and all log-probabilities, keep their bits."""
    backend = load_backend(worker_config(long_model.path, 80, backend="cpu", num_threads=2, max_model_len=64))
    assert isinstance(backend, CpuBackend)
    table = RowTable(backend.facts.num_blocks, BLOCK, backend.facts.hidden_size)
    sampling = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1)
    rows = [AddedRow(row, 0, [row, 2 * row + 1], 2, 0, [row], sampling) for row in range(80)]
    plan = StepPlan(0, [], rows, [], [Chunk(row, 0, 2) for row in range(80)], [])
    table.apply(plan)
    batch = build_batch(table, plan)
    free = backend.start_step(batch)()
    best = [line.token_id for line in free.sampled]
    masked = {0: allow({5}), 3: ~allow({best[3]}), 70: allow({0, 1002}), 79: ~allow({})}

    words, before = Awaited(backend), backend.seconds()
    words.set_result(np.stack(list(masked.values())))
    told = backend.start_step(replace(batch, masks=GrammarBitmasks(list(masked), words)))()
    assert words.seconds["head"] > before["head"]
    assert words.seconds["sample"] == before["sample"]
    chosen = [line.token_id for line in told.sampled]
    assert (chosen[0], chosen[79]) == (5, best[79])
    assert chosen[70] in (0, 1002)
    for number, (one, other) in enumerate(zip(told.sampled, free.sampled, strict=True)):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert (one.logprobs.top_token_ids, one.logprobs.top) == (other.logprobs.top_token_ids, other.logprobs.top)
        assert number in masked or one == other
        assert number != 3 or one.token_id == one.logprobs.top_token_ids[1]
    assert told.prompt_logprobs == free.prompt_logprobs

    failing: Future[Words] = Future()
    failing.set_exception(ValueError("no masks"))
    with pytest.raises(ValueError, match="no masks"):
        backend.start_step(replace(batch, masks=GrammarBitmasks([0], failing)))()
    assert backend.start_step(batch)() == free
