"""The backend for CPUs: its bits depend on the request alone, its process is lean and comes back as it was, and what it
cannot do it refuses with a remedy."""

import logging
import os
import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.kernels.cpu.bindings import LibraryMissing, load_library
from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu import loading as cpu_loading, model as cpu_model
from penstock.models.errors import ModelError
from penstock.models.executor import spawn
from penstock.models.executor.process import WorkerProcess
from penstock.models.worker.runner import Runner
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan

pytestmark = pytest.mark.usefixtures("cpu_library")

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "kv int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
ODD = {
    "vocab_size": 1003,
    "hidden_size": 144,
    "intermediate_size": 250,
    "num_attention_heads": 6,
    "head_dim": 40,
}
"""Sizes that fill neither panels nor groups."""
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@pytest.fixture(scope="module")
def odd(tmp_path_factory, build_model):
    return build_model(tmp_path_factory.mktemp("odd"), "Qwen3Config", ODD)


@pytest.fixture
def on_cpu(in_process, monkeypatch):
    """An executor in this process, that uses all its threads in the smallest of steps."""
    monkeypatch.setattr(cpu_model, "SMALL_STEP", 0)
    return partial(in_process, backend="cpu")


# ----------------------------------------------------------------------------------------------------------------- bits

LENGTHS = (1, 5, 16, 33, 75, 130, 300, 600)
"""Of prompts: within a page, and over several of the pieces in which long contexts are read."""
NUM_TOKENS = 8
MAX_MODEL_LEN = 640


def requests(vocab_size):
    """32 prompts, each with its own way to choose: greedy, as it comes, filtered, penalised."""
    rng = np.random.default_rng(5)
    ways = (
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(logprobs=2),
        SamplingParams(logprobs=2, top_p=0.9, top_k=40),
        SamplingParams(logprobs=2, repetition_penalty=1.2, frequency_penalty=0.1),
    )
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]
    return [(prompts[i % 8], msgspec.structs.replace(ways[i // 8], seed=i)) for i in range(32)]


def bits(answer):
    """All that a request was told, to the last bit."""
    assert answer.finished is not None
    assert len(answer.token_ids) == NUM_TOKENS
    told = [part.logprobs for part in answer.prompt_logprobs]
    of_prompt = [(value, *entry) for part in told for value, entry in zip(part.chosen, tops(part), strict=True)]
    return answer.token_ids, answer.logprobs, answer.tops, of_prompt


def tops(part):
    k = part.num_top
    return [(part.top_token_ids[i : i + k], part.top[i : i + k]) for i in range(0, k * len(part.chosen), k)]


async def all_at_once(engine, wanted):
    answers = [engine.submit(prompt, sampling, NUM_TOKENS) for prompt, sampling in wanted]
    await engine.engine.wait_idle()
    return [bits(answer) for answer in answers]


async def check_bits(model, config, on_cpu, start_engine, chunks):
    """However the requests are batched, cut, cached, preempted and spread over threads, they get what each gets alone.
    ``chunks`` is pairs of tokens in a step and threads."""
    wanted = requests(model.module.config.vocab_size)
    make = partial(on_cpu, model.path, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=8192, **config)
    engine = await start_engine(make(), enable_prefix_caching=False)
    alone = [(await all_at_once(engine, [one]))[0] for one in wanted]
    assert len({tuple(told[0]) for told in alone}) > 12, "the requests differ too little"

    executor = make(num_threads=2)
    engine = await start_engine(executor, enable_prefix_caching=False)
    assert await all_at_once(engine, wanted) == alone
    assert max(len(plan.decodes) for plan in executor.plans) == 32

    for num_tokens, num_threads in chunks:
        executor = make(num_threads=num_threads)
        engine = await start_engine(executor, enable_prefix_caching=False, max_num_batched_tokens=num_tokens)
        assert await all_at_once(engine, wanted) == alone
        sizes = [sum(c.end - c.start for c in plan.chunks) + len(plan.decodes) for plan in executor.plans]
        assert max(sizes) <= num_tokens

    engine = await start_engine(make(num_threads=3))
    for _ in range(2):  # the second time each finds its own prompt in the cache
        again = [engine.submit(prompt, sampling, NUM_TOKENS) for prompt, sampling in wanted]
        await engine.engine.wait_idle()
        assert [bits(answer) for answer in again] == alone
    assert sum(answer.finished.usage.cached_tokens for answer in again) > 3 * (592 + 288 + 128)

    engine = await start_engine(make(num_blocks=44, num_threads=2), enable_prefix_caching=False)
    assert await all_at_once(engine, wanted) == alone
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("format", list(FORMATS))
async def test_bits_depend_only_on_the_request(odd, on_cpu, start_engine, format):
    await check_bits(odd, FORMATS[format], on_cpu, start_engine, [(77, 1), (256, 3)])


@pytest.mark.parametrize("variant", ["gemma2", "gemma4-inputs", "gemma4-experts", "gpt-oss", "deepseek-v2"])
async def test_bits_of_windows_caps_sinks_and_experts(tiny_model, on_cpu, start_engine, variant):
    await check_bits(tiny_model(variant), FORMATS["bfloat16"], on_cpu, start_engine, [(48, 3)])


@pytest.mark.soak
@pytest.mark.parametrize("format", list(FORMATS))
async def test_bits_of_every_model(typical_model, on_cpu, start_engine, format):
    if format == "kv int8" and hasattr(typical_model.module.config, "kv_lora_rank"):
        pytest.skip("latents are not stored as int8")
    chunks = [(33, 3), (48, 2), (100, 3), (161, 1), (256, 2), (1000, 3)]
    await check_bits(typical_model, FORMATS[format], on_cpu, start_engine, chunks)


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("variant", ["qwen2-tied", "gemma4-inputs", "gpt-oss"])
async def test_dummy_weights_of_every_format(tiny_model, tmp_path, on_cpu, start_engine, prompts, variant, format):
    (tmp_path / "config.json").write_text((tiny_model(variant).path / "config.json").read_text())
    config = {**FORMATS[format], "load_format": "dummy"}
    executor = on_cpu(tmp_path, **config)
    facts = (await start_engine(executor)).engine.facts
    assert (facts.backend, facts.quantization) == ("cpu", config.get("quantization", "none"))
    auto = "int8" if "quantization" in config else config["dtype"]
    assert facts.kv_cache_dtype == config.get("kv_cache_dtype", auto)
    told = []
    for _ in range(2):
        answers = await (await start_engine(on_cpu(tmp_path, **config))).run(prompts, GREEDY, NUM_TOKENS)
        told.append([(answer.token_ids, answer.logprobs) for answer in answers])
    assert told[0] == told[1]


async def test_a_restart_gives_the_same_facts(odd, worker_config, capfd):
    config = worker_config(
        odd.path, backend="cpu", kv_cache_bytes=None, memory_utilization=0.01, quantization="int8", dtype="bfloat16"
    )
    worker = WorkerProcess(config)
    facts = await worker.start()
    try:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ExecutorError):
            await anext(worker.results())
        await worker.stop()
        assert await worker.start() == facts
        assert (facts.backend, facts.quantization) == ("cpu", "int8")
        assert capfd.readouterr().err.count("int8: the weights' relative error is ") == 2  # each says it once
    finally:
        await worker.stop()


# -------------------------------------------------------------------------------------------------------------- process

WORKER = """
import os, pathlib, sys
from penstock.models.worker import main as worker

def exit_with_list(code, exit=os._exit):
    pathlib.Path({file!r}).write_text(" ".join(sys.modules))
    exit(code)

os._exit = exit_with_list
worker.main()
"""


async def test_a_worker_imports_no_tensor_library_and_can_be_silent(odd, worker_config, tmp_path, monkeypatch, capfd):
    file = tmp_path / "modules"
    monkeypatch.setattr(spawn, "WORKER", WORKER.format(file=str(file)))
    config = worker_config(odd.path, backend="auto", dtype="bfloat16", quantization="int8", log_level="warning")
    worker = WorkerProcess(config)
    facts = await worker.start()
    assert facts.backend == "cpu"
    added = AddedRow(0, 0, [1, 2], 2, 0, [0], SamplingParams(logprobs=1, prompt_logprobs=1, bad_words=((1, 2),)))
    worker.submit(StepPlan(0, [], [added], [], [Chunk(0, 0, 2)], []))
    assert (await anext(worker.results())).rows[0].token_ids
    await worker.stop()
    modules = {name.partition(".")[0] for name in file.read_text().split()}
    assert capfd.readouterr().err == ""
    assert "numpy" in modules
    assert modules.isdisjoint({"torch", "transformers", "safetensors", "huggingface_hub", "tokenizers", "grpc"})


@pytest.mark.parametrize(("instruction_set", "integers"), [("avx512_vnni", 192), ("avx2", 96)])
def test_steps_have_more_tokens_where_integers_are_multiplied_faster(instruction_set, integers):
    spec: Any = SimpleNamespace(num_parameters=400_000_000, vocab_size=0, hidden_size=0, layer_inputs=None)
    assert cpu_loading._default_budget(spec, instruction_set, 2, has_integers=False) == 96
    assert cpu_loading._default_budget(spec, instruction_set, 2, has_integers=True) == integers


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device": "cuda"}, "--backend cpu: --device is cuda.*--device cpu"),
        ({"dtype": "float16"}, "--backend cpu: --dtype is float16.*bfloat16"),
        ({"block_size": 8}, "--backend cpu: --block-size is 8.*16.*multiple"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: is for the backend cuda: give auto, .* or int8"),
        (
            {"kv_cache_dtype": "bfloat16", "dtype": "float32"},
            "--kv-cache-dtype bfloat16: the activations are in float32: give auto, float32 or int8",
        ),
        ({"quantization": "int2"}, "--quantization int2: must be one of"),
        ({"quantization": "gptq"}, "--quantization gptq: .*not quantised: leave the flag out"),
        ({"load_format": "pickle"}, "--load-format pickle: must be auto or dummy"),
        ({"max_model_len": 4096}, "--max-model-len 4096.*2048; give at most that"),
        ({"kv_cache_bytes": 4096}, "one request of 1024 tokens needs .*raise --kv-cache-memory-bytes"),
        ({"host_kv_cache_bytes": 1 << 20}, "--host-kv-cache-bytes: on a CPU .*: give .* to --kv-cache-memory-bytes"),
    ],
)
def test_what_cannot_be_loaded_names_the_flag(tiny_model, worker_config, changes, says):
    with pytest.raises(ModelError, match=says) as caught:
        load_backend(worker_config(tiny_model("llama").path, **{"backend": "cpu", "dtype": "bfloat16", **changes}))
    assert "\n" not in str(caught.value)


def test_a_missing_library_falls_back_to_the_other_backend_with_one_warning(
    tiny_model, worker_config, monkeypatch, caplog
):
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", "/nowhere/libpenstock_cpu.so")
    with pytest.raises(LibraryMissing):
        load_library()
    with pytest.raises(ModelError, match=r"--backend cpu: /nowhere/libpenstock_cpu\.so.*PENSTOCK_CPU_LIBRARY"):
        load_backend(worker_config(tiny_model("llama").path, backend="cpu"))
    with caplog.at_level(logging.WARNING):
        assert load_backend(worker_config(tiny_model("llama").path, backend="auto")).facts.backend == "reference"
    [record] = caplog.records
    assert "SLOW" in record.message
    assert "PENSTOCK_CPU_LIBRARY" in record.message


def run_prompt(runner, prompt, sampling):
    added = AddedRow(0, 0, prompt, len(prompt), 0, [0], sampling)
    result = runner.run(StepPlan(0, [], [added], [], [Chunk(0, 0, len(prompt))], []))
    return [part.logprobs for part in result.prompt_logprobs]


def test_more_likeliest_tokens_than_there_are(odd, worker_config):
    runner = Runner(load_backend(worker_config(odd.path, backend="cpu", tokenizer_vocab_size=3)))
    [part] = run_prompt(runner, [0, 1, 2, 0], SamplingParams(logprobs=5, prompt_logprobs=5))
    assert part.num_top == 3
    for begin in range(0, 9, 3):
        assert sorted(part.top_token_ids[begin : begin + 3]) == [0, 1, 2]
        assert np.exp(part.top[begin : begin + 3]).sum() == pytest.approx(1.0, abs=1e-5)


def test_a_prompt_id_without_a_logit_never_gets_another_tokens_logprob(odd, worker_config):
    runner = Runner(load_backend(worker_config(odd.path, backend="cpu", tokenizer_vocab_size=40)))
    with pytest.raises(AssertionError, match="tokenizer's vocabulary"):
        run_prompt(runner, [1, 40], SamplingParams(prompt_logprobs=0))


def test_a_long_context_makes_the_step_of_a_small_model_large(tiny_model, worker_config):
    """One token costs little, and attention to all tokens before it much."""
    backend: Any = load_backend(worker_config(tiny_model("llama").path, backend="cpu", num_threads=2))
    num_threads = backend.model.num_threads
    assert num_threads(1) == 1
    assert num_threads(1, cpu_model.seen_pairs(np.array([100]), np.array([101]))) == 1
    assert num_threads(1, cpu_model.seen_pairs(np.array([1_000_000]), np.array([1_000_001]))) == 2
    assert num_threads(1_000_000) == 2
