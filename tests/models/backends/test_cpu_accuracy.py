"""How close the CPU backend comes to transformers in float32 on the demo model's held-out documents: bfloat16 position
by position, int8 and int4 by perplexity. CI looks at the first documents, the soak test at all of them."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan

pytestmark = pytest.mark.usefixtures("cpu_library")

HELD_OUT = Path(__file__).parents[1] / "heldout.jsonl"
WINDOW = 1024
"""Tokens that are read as one text."""
VOCAB_SIZE = 4096


@cache
def windows():
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model(DEMO) / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [part[i : i + WINDOW] for part in ids for i in range(0, len(part), WINDOW) if len(part) - i > 16]


class Model:
    """The demo model on the CPU backend."""

    def __init__(self, worker_config, **config):
        self._runner = Runner(load_backend(worker_config(resolve_model(DEMO), backend="cpu", **config)))
        self._step = 0

    def prompt_logprobs(self, token_ids, num_top):
        """What is told of each token but the first, in one chunk."""
        blocks = list(range(-(-len(token_ids) // 16)))
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=num_top)
        row = AddedRow(0, 0, token_ids, len(token_ids), 0, blocks, sampling)
        result = self._runner.run(StepPlan(self._step, [], [row], [], [Chunk(0, 0, len(token_ids))], []))
        self._runner.run(StepPlan(self._step + 1, [0], [], [], [], []))
        self._step += 2
        return [part.logprobs for part in result.prompt_logprobs]

    def all_logprobs(self, token_ids):
        """(positions - 1, vocabulary)."""
        dense = np.full((len(token_ids) - 1, VOCAB_SIZE), np.nan, dtype=np.float32)
        begin = 0
        for part in self.prompt_logprobs(token_ids, VOCAB_SIZE):
            ids = np.array(part.top_token_ids).reshape(-1, part.num_top)
            np.put_along_axis(dense[begin : begin + len(ids)], ids, np.array(part.top).reshape(ids.shape), axis=1)
            begin += len(ids)
        return torch.from_numpy(dense)

    def perplexity(self, texts):
        told = [value for text in texts for part in self.prompt_logprobs(text, 0) for value in part.chosen]
        return math.exp(-sum(told) / len(told))


def compare_in_bfloat16(worker_config, texts):
    """Teacher-forced. A shift common to all logits of a position changes no probability and no choice, so the error of
    a logit is what is left after the shift that leaves least; a gap over twice the largest one keeps the choice."""
    model = Model(worker_config, dtype="bfloat16")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(resolve_model(DEMO), dtype=torch.float32).eval()
    worst = total = 0.0
    gaps, agree = [], []
    for text in texts:
        with torch.inference_mode():
            expected = oracle(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        got = model.all_logprobs(text)
        assert not got.isnan().any()
        errors = got - expected
        errors = (errors - (errors.amax(1, keepdim=True) + errors.amin(1, keepdim=True)) / 2).abs()
        worst, total = max(worst, float(errors.max())), total + float(errors.mean(dim=1).sum())
        best = expected.topk(2, dim=-1)
        gaps.append(best.values[:, 0] - best.values[:, 1])
        agree.append(got.argmax(-1) == best.indices[:, 0])
    gap, same = torch.cat(gaps), torch.cat(agree)
    clear = gap > 2 * worst
    print(
        f"\n{len(gap)} positions: logit error {worst:.4f} at most, {total / len(gap):.5f} in the mean; top-1 agreement "
        f"{same.float().mean():.2%}; the gap exceeds twice the largest error at {clear.float().mean():.1%} of positions"
    )
    assert same[clear].all()
    assert same.float().mean() >= 0.99
    assert clear.float().mean() >= 0.9


def test_bfloat16_beside_transformers_in_float32(worker_config):
    compare_in_bfloat16(worker_config, windows()[:2])


@pytest.mark.soak
def test_bfloat16_beside_transformers_in_float32_at_20000_positions(worker_config):
    texts = windows()
    assert sum(map(len, texts)) > 20_000
    compare_in_bfloat16(worker_config, texts)


@pytest.mark.parametrize(("config", "growth"), [
    ({"quantization": "int8"}, 1.01), ({"quantization": "int4"}, 1.05), ({"kv_cache_dtype": "int8"}, 1.01),
])  # fmt: skip
@pytest.mark.parametrize("num_windows", [6, pytest.param(24, marks=pytest.mark.soak)])
def test_perplexity_beside_bfloat16(worker_config, config, growth, num_windows):
    texts = windows()[:num_windows]
    plain = Model(worker_config, dtype="bfloat16").perplexity(texts)
    quantized = Model(worker_config, dtype="bfloat16", **config).perplexity(texts)
    print(f"\n{sum(map(len, texts))} tokens: perplexity {plain:.4f} in bfloat16, {quantized:.4f} with {config}")
    assert plain < quantized * 1.01
    assert quantized <= plain * growth
