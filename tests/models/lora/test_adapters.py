"""Adapters and the base model in one batch: each row's output equals that of a model with the adapter merged into its
weights, and no row's bits depend on what else is in the batch."""

import asyncio
import itertools
import os
import signal
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from waiting import until

from penstock.models.executor.process import WorkerProcess
from penstock.models.worker.adapter_thread import AdapterThread
from penstock.scheduler.loop.adapter_loader import AdapterError
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, SamplingParams

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
NUM_TOKENS = 12
SLOTS = {"max_loras": 4, "max_lora_rank": 8}
VARIANTS = ("llama", "gemma2", "cohere", "olmo2")
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 8, "alpha": 4, "use_rslora": True, "modules": ("q_proj", "v_proj")},
    {"rank": 1, "alpha": 2, "modules": ("gate_proj", "down_proj")},
    {"rank": 3, "alpha": -3, "layers": (0, 2), "modules": ("k_proj", "o_proj", "up_proj")},
)
"""Four adapters that differ in all that they may differ in."""


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Each that runs on a CPU, in turn."""
    if request.param == "cpu":
        request.getfixturevalue("cpu_library")
    return request.param


@pytest.fixture
def paths(tiny_model, write_adapter, tmp_path):
    """Writes the four adapters for a variant."""

    def paths(variant):
        module = tiny_model(variant).module
        return [write_adapter(tmp_path / f"{n}", module, seed=n, **kind) for n, kind in enumerate(KINDS)]

    return paths


async def load_all(engine, paths):
    return [await engine.engine.adapters.load(path.name, str(path)) for path in paths]


def check(model, prompt, answer):
    """The answer is the greedy continuation, with its log-probabilities."""
    assert len(answer.token_ids) == NUM_TOKENS
    logits = model.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-3, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
async def test_four_adapters_and_the_base_in_one_batch_equal_merged_weights(
    variant, backend, tiny_model, paths, merged, in_process, start_engine, prompts
):
    model, directories = tiny_model(variant), paths(variant)
    executor = in_process(model.path, backend=backend, **SLOTS)
    engine = await start_engine(executor)
    adapters = await load_all(engine, directories)
    models = [model, *(merged(model, path) for path in directories)]
    chosen = list(itertools.islice(itertools.cycle([None, *adapters]), len(prompts) + 2))
    cycled = list(zip([*prompts, *prompts[:2]], chosen, strict=True))
    answers = [engine.submit(prompt, GREEDY, NUM_TOKENS, adapter=adapter) for prompt, adapter in cycled]
    await engine.finish(answers)
    assert max(len(plan.decodes) for plan in executor.plans) == len(cycled)
    assert {row.adapter for plan in executor.plans for row in plan.added} == {0, 1, 2, 3, 4}
    for index, ((prompt, _), answer) in enumerate(zip(cycled, answers, strict=True)):
        check(models[index % 5], prompt, answer)
    assert len({tuple(answer.token_ids) for answer in answers}) > 3, "adapters change the output"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bits_on_the_cpu_do_not_depend_on_the_batch(
    dtype, quantization, cpu_library, tiny_model, paths, in_process, start_engine, prompts
):
    """The base's equal those of a service without adapters."""
    model, directories = tiny_model("llama"), paths("llama")
    config = {"backend": "cpu", "dtype": dtype, "quantization": quantization}
    plain = await start_engine(in_process(model.path, **config))
    expected = [answer.output for answer in await plain.run(prompts, GREEDY, NUM_TOKENS)]
    engine = await start_engine(in_process(model.path, **config, **SLOTS))
    adapters = await load_all(engine, directories)
    assert [answer.output for answer in await engine.run(prompts, GREEDY, NUM_TOKENS)] == expected

    alone = []
    for adapter in adapters:
        answer = engine.submit(prompts[4], GREEDY, NUM_TOKENS, adapter=adapter, tenant=f"alone {adapter.name}")
        await engine.finish([answer])
        alone.append(answer.output)
    assert len({tuple(tokens) for tokens, *_ in alone}) > 1
    base = [engine.submit(prompt, GREEDY, NUM_TOKENS, tenant="mixed") for prompt in prompts]
    mixed = [engine.submit(prompts[4], GREEDY, NUM_TOKENS, adapter=each, tenant="mixed") for each in adapters]
    await engine.finish(base + mixed)
    assert [answer.output for answer in base] == expected
    assert [answer.output for answer in mixed] == alone


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
async def test_more_adapters_than_slots_take_turns_and_no_prefix_is_shared(
    backend, tiny_model, paths, merged, in_process, start_engine, prompts
):
    model, directories = tiny_model("llama"), paths("llama")
    executor = in_process(model.path, backend=backend, max_loras=2, max_lora_rank=8, max_num_seqs=3)
    engine = await start_engine(executor)
    adapters = await load_all(engine, directories)
    assert [adapter.slot for adapter in adapters] == [1, 2, 0, 0]
    models = [merged(model, path) for path in directories]
    prompt = prompts[-1]  # the same for all: a shared block would show
    answers = [engine.submit(prompt, GREEDY, NUM_TOKENS, adapter=adapters[n % 4]) for n in range(12)]
    answers.append(engine.submit(prompt, GREEDY, NUM_TOKENS))
    await engine.finish(answers)
    for index, answer in enumerate(answers[:-1]):
        check(models[index % 4], prompt, answer)
    check(model, prompt, answers[-1])
    again = engine.submit(prompt, GREEDY, NUM_TOKENS, adapter=adapters[0])
    await engine.finish([again])
    assert again.finished.usage.cached_tokens == len(prompt) // 16 * 16
    assert sum(load.slot > 0 for load in executor.adapter_loads) > 4


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
async def test_log_probabilities_of_prompts_are_the_adapters(
    backend, tiny_model, paths, merged, in_process, start_engine, prompts
):
    model, directories = tiny_model("llama"), paths("llama")
    engine = await start_engine(in_process(model.path, backend=backend, **SLOTS))
    adapters = await load_all(engine, directories)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    answers = [engine.submit(prompts[-1], sampling, 1, adapter=adapter) for adapter in adapters]
    await engine.finish(answers)
    for path, answer in zip(directories, answers, strict=True):
        chosen = [value for chunk in answer.prompt_logprobs for value in chunk.logprobs.chosen]
        logits = merged(model, path).logits(prompts[-1]).log_softmax(-1)[:-1]
        expected = logits.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(chosen), expected, atol=1e-3, rtol=0)


async def test_a_worker_process_loads_and_loads_again_after_its_death(
    cpu_library, tiny_model, paths, merged, worker_config, start_engine, prompts
):
    model, directories = tiny_model("llama"), paths("llama")
    executor = WorkerProcess(worker_config(model.path, backend="cpu", **SLOTS))
    engine = await start_engine(executor)
    running = engine.submit(prompts[0], GREEDY, 400)
    adapters = await load_all(engine, directories)
    with pytest.raises(AdapterError, match="no such directory"):
        await engine.engine.adapters.load("none", "/nowhere")
    answers = [engine.submit(prompts[3], GREEDY, NUM_TOKENS, adapter=adapter) for adapter in adapters]
    await until(lambda: any(answer.token_ids for answer in answers))
    os.kill(executor.pid, signal.SIGKILL)
    await engine.finish([running, *answers])
    for path, answer in zip(directories, answers, strict=True):
        check(merged(model, path), prompts[3], answer)


async def test_loads_fail_when_the_worker_ends(tiny_model, worker_config):
    executor = WorkerProcess(worker_config(tiny_model("llama").path, **SLOTS))
    await executor.start()
    load = asyncio.ensure_future(executor.load_adapter(AdapterLoad(0, "/nowhere")))
    answer = await load
    assert "no such directory" in answer.error
    late = asyncio.ensure_future(executor.load_adapter(AdapterLoad(0, "/nowhere")))
    await asyncio.sleep(0)
    await executor.stop()
    done, _ = await asyncio.wait([late])
    assert done
    assert late.exception() is not None or "no such directory" in late.result().error


def test_a_load_that_fails_unexpectedly_is_answered_and_so_is_the_next_one(worker_config, tmp_path):
    """The model's own files are gone, so not even its spec can be read."""
    answers: SimpleQueue[AdapterLoaded] = SimpleQueue()
    backend: Any = None  # nothing comes that far
    thread = AdapterThread(worker_config(tmp_path / "gone"), backend, answers.put)
    for _ in range(2):
        thread.load(AdapterLoad(0, "/adapter"))
        answer = answers.get(timeout=60)
        assert "/adapter: " in answer.error
        assert "gone" in answer.error
