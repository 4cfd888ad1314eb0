"""Loading: dtypes, shards, dummy weights, the vocabulary's upper rows, and memory that does not suffice."""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from penstock.models.backends import memory
from penstock.models.backends.base import load_backend
from penstock.models.backends.torch_common.weights import scale_of_embeddings
from penstock.models.checkpoint.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.models.errors import ModelError
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan

GREEDY = SamplingParams(temperature=0.0, logprobs=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.03), ("float64", 1e-4)])
async def test_other_dtypes_come_close(tiny_model, in_process, start_engine, prompts, dtype, tolerance):
    for variant in (
        "llama-tied-biases-head24",
        "qwen3-tied-bias-yarn-windows",
        "mistral-window9",
        "olmo2",
        "gpt-oss",
        "gemma4-inputs",
        "gemma4-experts",
    ):
        model = tiny_model(variant)
        engine = await start_engine(in_process(model.path, dtype=dtype))
        assert engine.engine.facts.dtype == dtype
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
        for prompt, answer in zip(prompts[2:], await engine.run(prompts[2:], sampling, 2), strict=True):
            expected = model.logits(prompt).log_softmax(-1)[:-1]
            chosen = expected.gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
            got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
            assert (got - chosen).abs().mean() < tolerance


@pytest.mark.parametrize(
    ("config_class", "changes", "rounded"),
    [
        ("GraniteConfig", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}, None),
        ("GraniteMoeConfig", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "num_local_experts": 4}, None),
        ("Gemma3TextConfig", {"hidden_size": 72, "head_dim": 16}, 8.5),
        ("GemmaConfig", {"hidden_size": 72, "head_dim": 16}, 8.5),
    ],
)
def test_only_gemmas_factor_of_embeddings_is_rounded(
    tmp_path, build_model, worker_config, cpu_library, config_class, changes, rounded
):
    """12 / 0.22 is 54.545, and would be 54.5 in bfloat16; the root of 72 is 8.485."""
    build_model(tmp_path, config_class, changes)
    spec = check_checkpoint(tmp_path).spec
    expected = spec.embedding_scale if rounded is None else rounded
    ours: Any = load_backend(worker_config(tmp_path, backend="cpu", dtype="bfloat16"))
    assert ours.model.model.embedding_scale == pytest.approx(expected, rel=1e-6)
    assert scale_of_embeddings(spec, torch.bfloat16) == pytest.approx(expected, rel=1e-6)
    exact: Any = load_backend(worker_config(tmp_path, backend="cpu", dtype="float32"))
    assert exact.model.model.embedding_scale == pytest.approx(spec.embedding_scale, rel=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"max_model_len": 1}, {"max_model_len": 5}, {"block_size": 1}, {"tokenizer_vocab_size": 1}]
)
def test_warming_leaves_no_row(tiny_model, worker_config, changes):
    runner = Runner(load_backend(worker_config(tiny_model("mistral-window9").path, **changes)))
    runner.warm()
    measured = list(runner.measure_steps())
    assert not runner._rows._rows
    room = changes.get("max_model_len", 144)
    chunks = [(0, min(128, room)), *([(128, 144)] if room > 128 else [])]
    assert [(step.start, step.end) for step in measured if step.end and step.chunks == 1] == chunks
    decodes = [] if room < 3 or changes.get("block_size") == 1 else [1, 16]
    assert [step.decodes for step in measured if step.decodes] == decodes
    assert [step.chunks for step in measured if step.chunks > 1] == [number for number in decodes if number > 1]
    assert all(step.computed_us > 0 for step in measured)


async def test_dtype_auto_is_the_checkpoints(tiny_model, in_process):
    facts = await in_process(tiny_model("llama").path, dtype="auto", num_blocks=None).start()
    assert facts.dtype == "float32"


@pytest.mark.parametrize(("stored", "computed"), [("float16", "bfloat16"), ("float64", "float32")])
def test_a_dtype_unsupported_by_the_cpu_backend_is_replaced_and_logged(
    tiny_model, worker_config, tmp_path, cpu_library, caplog, stored, computed
):
    copy.deepcopy(tiny_model("llama").module).to(getattr(torch, stored)).save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        assert load_backend(worker_config(tmp_path, backend="cpu", dtype="auto")).facts.dtype == computed
    assert f"the checkpoint is in {stored}, which this backend computes in {computed}" in caplog.text
    with pytest.raises(ModelError, match=f"--dtype is {stored}, .*: give one of them, or leave --dtype out"):
        load_backend(worker_config(tmp_path, backend="cpu", dtype=stored))


async def test_sharded_weights_are_the_same(tiny_model, tmp_path, in_process, start_engine, prompts):
    model = tiny_model("llama")
    model.module.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole = await (await start_engine(in_process(model.path))).run(prompts, GREEDY, 8)
    sharded = await (await start_engine(in_process(tmp_path))).run(prompts, GREEDY, 8)
    assert [a.token_ids for a in sharded] == [a.token_ids for a in whole]


async def test_dummy_weights_need_only_the_config(tiny_model, tmp_path, in_process, start_engine):
    (tmp_path / "config.json").write_text((tiny_model("qwen2-some-windows").path / "config.json").read_text())
    outputs = []
    for _ in range(2):
        engine = await start_engine(in_process(tmp_path, load_format="dummy"))
        [answer] = await engine.run([[1, 2, 3]], GREEDY, 8)
        outputs.append(answer.token_ids)
    assert outputs[0] == outputs[1]


async def test_rows_above_the_tokenizers_vocabulary_are_never_chosen(tiny_model, in_process, start_engine, prompts):
    model = tiny_model("llama")
    engine = await start_engine(in_process(model.path, tokenizer_vocab_size=40))
    assert engine.engine.facts.vocab_size == 160
    sampling = SamplingParams(temperature=3.0, seed=5, logprobs=40)
    for answer in await engine.run(prompts, sampling, 24):
        assert max(answer.token_ids) < 40
        assert all(max(ids) < 40 for ids, _ in answer.tops)
    # ... and log-probabilities are over the tokenizer's vocabulary.
    [answer] = await engine.run([prompts[-1]], GREEDY, 1)
    expected = model.logits(prompts[-1])[-1, :40].log_softmax(-1).max()
    assert answer.logprobs == pytest.approx([float(expected)], abs=1e-4)


def test_a_context_that_memory_does_not_hold_is_shortened(tiny_model, worker_config, caplog):
    path = tiny_model("llama").path
    per_block = 16 * check_checkpoint(path).spec.kv_bytes_per_token(4)
    facts = load_backend(worker_config(path, kv_cache_bytes=81 * per_block)).facts
    assert (facts.max_model_len, facts.num_blocks) == (80 * 16, 80)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("context 1,280: the KV cache holds no more, and the model was made for 2,048; raise ")
    with pytest.raises(ModelError, match="lower --max-model-len to at most 1280"):
        load_backend(worker_config(path, kv_cache_bytes=81 * per_block, max_model_len=2048))


@pytest.mark.parametrize(
    ("changes", "free", "says"),
    [
        ({"kv_cache_bytes": 1 << 18, "max_model_len": 512}, 1 << 30, r"--kv-cache-memory-bytes .* --max-model-len"),
        ({"kv_cache_bytes": 1024, "max_model_len": 512}, 1 << 30, "raise --kv-cache-memory-bytes$"),
        ({"kv_cache_bytes": 1 << 31}, 1 << 30, "--kv-cache-memory-bytes"),
        ({"kv_cache_bytes": None}, 1 << 20, r"--gpu-memory-utilization .* --max-model-len to at most \d+"),
        ({"host_kv_cache_bytes": 1 << 30}, 1 << 30, r"--host-kv-cache-bytes 1073741824: .* 0.94 GiB free .* give less"),
        ({"host_kv_cache_bytes": 1024}, 1 << 30, "--host-kv-cache-bytes 1024: a block needs .* give more"),
        ({}, 1 << 10, r"weights need .* --quantization int8 or int4, .* --dtype"),
        ({"max_model_len": 4096}, 1 << 30, "--max-model-len 4096.* 2048"),
        ({"dtype": "int8"}, 1 << 30, "--dtype int8"),
        ({"backend": "warp"}, 1 << 30, "backend warp.* reference"),
        ({"device": "cuda:99"}, 1 << 30, "--device cuda:99"),
        ({"device": "toaster"}, 1 << 30, "--device toaster"),
        ({"load_format": "pickle"}, 1 << 30, "--load-format pickle"),
    ],
)
def test_what_cannot_be_loaded_names_the_flag(tiny_model, worker_config, monkeypatch, changes, free, says):
    monkeypatch.setattr(memory, "free_bytes", lambda device, limit, num_ranks: free)
    with pytest.raises(ModelError, match=says) as caught:
        load_backend(worker_config(tiny_model("llama").path, **changes))
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_allocated_is_one_line(tiny_model, worker_config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, limit, num_ranks: 1 << 60)
    with pytest.raises(ModelError, match="cannot be allocated on cpu: lower --gpu-memory-utilization"):
        load_backend(worker_config(tiny_model("llama").path, kv_cache_bytes=1 << 59))


def test_kv_takes_its_share_of_what_is_free(tiny_model, worker_config, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, limit, num_ranks: 100 << 20)
    config = worker_config(tiny_model("llama").path, kv_cache_bytes=None, memory_utilization=0.25)
    facts = load_backend(config).facts
    block_bytes = 2 * 3 * 2 * 16 * 4 * 16
    assert facts.kv_bytes == (facts.num_blocks + 1) * block_bytes
    assert (25 << 20) - block_bytes < facts.kv_bytes <= 25 << 20


GIB = 1 << 30


@pytest.mark.parametrize(
    ("available", "limit", "num_ranks", "expected"),
    [
        (4 * GIB, None, 1, 4 * GIB),
        (4 * GIB, 3 * GIB, 1, 2 * GIB),
        (GIB, 3 * GIB, 1, GIB),
        (4 * GIB, GIB // 2, 1, 0),
        (4 * GIB, None, 4, GIB),
        (9 * GIB, 3 * GIB, 2, 2 * GIB),
    ],
)
def test_what_is_free_is_within_what_the_worker_may_take(monkeypatch, available, limit, num_ranks, expected):
    taken = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=GIB))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(psutil, "Process", lambda: taken)
    assert memory.free_bytes("cpu", limit, num_ranks) == expected


def test_a_limit_of_memory_bounds_weights_and_cache(tiny_model, worker_config):
    path = tiny_model("llama").path
    with pytest.raises(ModelError, match=r"weights need .* 0.00 MiB free"):
        load_backend(worker_config(path, max_memory_bytes=1))
    limit = psutil.Process().memory_info().rss + (128 << 20)
    facts = load_backend(worker_config(path, kv_cache_bytes=None, memory_utilization=0.5, max_memory_bytes=limit)).facts
    assert facts.kv_bytes <= 64 << 20


@pytest.mark.parametrize("max_model_len", [5, 40])
async def test_a_request_may_end_where_the_context_does(tiny_model, in_process, start_engine, prompts, max_model_len):
    executor = in_process(tiny_model("llama").path, max_model_len=max_model_len)
    engine = await start_engine(executor, max_plans_in_flight=2)
    [answer] = await engine.run([prompts[-1][:3]], GREEDY, max_model_len - 3)
    assert len(answer.token_ids) == max_model_len - 3
    [[cos, _]] = executor._runner._backend._cos_sin_tables.values()
    assert cos.shape[0] == max_model_len


async def test_a_prompt_id_without_a_logit_never_gets_another_tokens_logprob(tiny_model, in_process):
    executor = in_process(tiny_model("llama").path, tokenizer_vocab_size=40)
    await executor.start()
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    added = AddedRow(0, 0, [1, 40], 2, 0, [0], sampling)
    with pytest.raises(AssertionError, match="tokenizer's vocabulary"):
        executor._runner.run(StepPlan(0, [], [added], [], [Chunk(0, 0, 2)], []))


@pytest.fixture
def without_torch(monkeypatch):
    """An installation on a CPU: nothing can import torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "penstock.models.backends.reference.backend", raising=False)


@pytest.mark.usefixtures("without_torch")
def test_a_backend_whose_packages_are_missing_comes_with_the_remedy(worker_config):
    remedy = r"--backend reference: torch is not installed: pip install 'penstock-llm\[torch\]'"
    with pytest.raises(ModelError, match=remedy):
        load_backend(worker_config(resolve_model(DEMO), backend="reference"))


@pytest.mark.usefixtures("without_torch")
def test_without_a_backend_that_can_run_the_reason_of_each_is_reported(worker_config, monkeypatch, caplog):
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", "/none")
    with pytest.raises(ModelError, match=r"--backend cpu: .*/none.*; --backend reference: torch is not installed"):
        load_backend(worker_config(resolve_model(DEMO), backend="auto"))
    assert "SLOW" not in caplog.text
