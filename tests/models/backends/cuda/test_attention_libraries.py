"""``--attention-backend``: a library that is not installed is refused by name, and one that is gets the pages as they
are. Fakes stand for the libraries, which need a GPU, and compute by the reference from what they are given."""

import itertools
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.kernels.reference import ops as reference
from penstock.models.backends.base import load_backend
from penstock.models.errors import ModelError
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the libraries are fakes"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's, in the interpreter
]

SMALL: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 64, "num_blocks": 24, "dtype": "float16"}
PROMPTS = ([3, 9, 1, 33, 12, 5, 70, 81, 2, 14, 99, 4, 150, 8, 21, 6, 44], [7, 2, 19], [5])


def attend(query: Tensor, pages: tuple[Tensor, Tensor], tables: list[list[int]], starts: list[int],
           contexts: list[int], window_left: int, scale: float, cap: float) -> Tensor:  # fmt: skip
    """The attention of sequences, on (K, pages, 16, D) each of keys and values."""
    spans = list(itertools.pairwise(starts))
    chosen = [index for index, (begin, end) in enumerate(spans) if end > begin]
    return reference.paged_attention(
        query[: starts[-1]].float(),
        pages[0].float(),
        pages[1].float(),
        [tables[index] for index in chosen],
        [spans[index] for index in chosen],
        [contexts[index] - (spans[index][1] - spans[index][0]) for index in chosen],
        None if window_left < 0 else window_left + 1,
        scale=scale,
        cap=cap or None,
    ).to(query.dtype)


def flash_attn_with_kvcache(
    query, keys, values, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size,
    softcap,
):  # fmt: skip
    """FlashAttention 3, on (pages, 16, K, D) each of keys and values, whose last numbers lie together."""
    starts, contexts = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    assert causal
    assert window_size[1] == 0
    assert keys.shape == values.shape
    assert keys.stride(-1) == 1
    assert {cache_seqlens.dtype, page_table.dtype, cu_seqlens_q.dtype} == {torch.int32}
    assert max(end - begin for begin, end in itertools.pairwise(starts)) <= max_seqlen_q
    tables = [table[: -(-context // 16)] for table, context in zip(page_table.tolist(), contexts, strict=True)]
    with _disable_current_modes():  # what a fake does is not captured
        pages = keys.permute(2, 0, 1, 3), values.permute(2, 0, 1, 3)
        out = torch.full_like(query, torch.nan)
        out[: starts[-1]] = attend(query, pages, tables, starts, contexts, window_size[0], softmax_scale, softcap)
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer, on (pages, 2, K, 16, D)."""

    num_runs = 0

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim, page_size, *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        numbers = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in numbers} == {torch.int32}
        assert causal
        assert q_data_type == kv_data_type == torch.float16
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 64, 16)
        ends, indices = paged_kv_indptr.tolist(), paged_kv_indices.tolist()
        self.starts = qo_indptr.tolist()
        self.tables = [indices[begin:end] for begin, end in itertools.pairwise(ends)]
        last = paged_kv_last_page_len.tolist()
        assert all(1 <= length <= 16 for length in last)
        self.contexts = [16 * (len(table) - 1) + length for table, length in zip(self.tables, last, strict=True)]
        self.options = window_left, sm_scale, logits_soft_cap

    def run(self, query, pages):
        type(self).num_runs += 1
        assert pages.is_contiguous()
        assert len(query) == self.starts[-1]
        keys, values = pages.permute(1, 2, 0, 3, 4)
        return attend(query, (keys, values), self.tables, self.starts, self.contexts, *self.options)


@pytest.fixture
def libraries(monkeypatch):
    """Both libraries, as if they were installed."""
    for name, function in (
        ("flash_attn_interface", flash_attn_with_kvcache),
        ("flashinfer", BatchPrefillWithPagedKVCacheWrapper),
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="module")
def path(tmp_path_factory, build_model):
    """A model with windows, caps and heads of 64 dimensions."""
    changes = {"head_dim": 64, "sliding_window": 9, "attn_logit_softcapping": 2.0, "num_hidden_layers": 2}
    return build_model(tmp_path_factory.mktemp("heads64"), "Gemma2Config", changes).path


def outputs(runner: Runner) -> tuple[list[list[int]], list[float]]:
    """The tokens of rows that decode beside prompts, and their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    rows = [AddedRow(n, 1, prompt, len(prompt), 0, [2 * n + 1, 2 * n], sampling) for n, prompt in enumerate(PROMPTS)]
    tokens: list[list[int]] = [[] for _ in rows]
    chosen: list[float] = []
    for step in range(len(rows) + 2):
        added = rows[step : step + 1]
        prompts = [Chunk(row.row, 0, len(row.token_ids)) for row in added]
        decodes = [Decode(row.row, 1) for row in rows[:step]]
        for of_row in runner.run(StepPlan(step, [], added, [], prompts, decodes)).rows:
            tokens[of_row.row] += of_row.token_ids
            assert of_row.logprobs is not None
            chosen += of_row.logprobs.chosen
    return tokens, chosen


@pytest.fixture(scope="module")
def expected(path, worker_config) -> tuple[list[list[int]], list[float]]:
    """By the kernels."""
    return outputs(Runner(load_backend(worker_config(path, backend="cuda", **SMALL))))


@pytest.mark.soak
@pytest.mark.usefixtures("libraries", "captures_are_checked")
@pytest.mark.parametrize("name", ["fa", "flashinfer"])
def test_a_library_computes_what_the_kernels_compute(name, path, worker_config, expected):
    BatchPrefillWithPagedKVCacheWrapper.num_runs = 0
    found, chosen = outputs(Runner(load_backend(worker_config(path, backend="cuda", attention_backend=name, **SMALL))))
    assert found == expected[0]
    assert chosen == pytest.approx(expected[1], abs=2e-2)
    num_layers, num_steps = 2, len(PROMPTS) + 2
    assert BatchPrefillWithPagedKVCacheWrapper.num_runs == (num_layers * num_steps if name == "flashinfer" else 0)


@pytest.mark.parametrize(("name", "module"), [("fa", "flash_attn_interface"), ("flashinfer", "flashinfer")])
def test_a_library_that_is_not_installed_is_refused_by_name(name, module, path, worker_config):
    assert not find_spec(module)
    with pytest.raises(ModelError, match=rf"--attention-backend {name}: {module} is not installed: .*install"):
        load_backend(worker_config(path, backend="cuda", attention_backend=name, **SMALL))


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "variant", "config", "problem"),
    [
        ("fa", "llama", {"deterministic": True}, "--deterministic needs"),
        ("fa", "llama", {"dtype": "float32"}, "the activations are in float32"),
        ("flashinfer", "llama", {}, "it has no heads of 16 dimensions: leave it out"),
        ("fa", "llama", {"kv_cache_dtype": "fp8"}, "a KV cache in fp8"),
        ("fa", "gpt-oss", {}, "it has no attention sinks"),
        ("fa", "llama4", {}, "it has no attention in chunks"),
        ("fa", "llama", {"backend": "reference"}, "is for the cuda backend: leave it out"),
        ("xformers", "llama", {}, "must be triton or one of flashinfer, fa"),
    ],
)
def test_what_a_library_cannot_compute_is_refused(name, variant, config, problem, tiny_model, worker_config):
    given = {**SMALL, "backend": "cuda", "attention_backend": name, **config}
    with pytest.raises(ModelError, match=rf"--attention-backend {name}.*{re.escape(problem)}"):
        load_backend(worker_config(tiny_model(variant).path, **given))
