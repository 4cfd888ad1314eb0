"""Tokens that are injected into a running output: it goes on as transformers says for the same history."""

import asyncio
import os
import signal

import pytest
import torch

from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import SequenceDelta, TokensInjected
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 40
INJECTED = {5: [7, 8, 9], 20: list(range(30, 70))}
"""The tokens to inject, by the number of output tokens after which they are sent."""
BACKENDS = ["reference", "cpu"]


def submit(engine, prompt, injected, **more):
    """A request into which tokens are injected; returns its answer, and the history's injections as they happened."""
    answer = engine.submit(prompt, GREEDY, NUM_TOKENS, **more)
    request = engine.engine._scheduler.requests[str(answer_number(engine))].request
    take, due, happened = request.sink, dict(injected), []
    loop = asyncio.get_running_loop()
    waiting = []

    def sink(event):
        take(event)
        if isinstance(event, SequenceDelta):
            for at in [at for at in due if at <= len(answer.token_ids)]:
                waiting.append(due.pop(at))
                loop.call_soon(engine.engine.inject, request.request_id, waiting[-1])
        elif isinstance(event, TokensInjected):
            tokens = waiting.pop(0)
            while len(tokens) < event.num_tokens:
                tokens = tokens + waiting.pop(0)
            assert len(tokens) == event.num_tokens
            happened.append((event.num_output_tokens, tokens))

    request.sink = sink
    return answer, happened


def answer_number(engine):
    return max(map(int, engine.engine._scheduler.requests))


def check(model, prompt, answer, happened):
    """Every token is the likeliest after the history before it."""
    assert [len(tokens) for _, tokens in happened] == [len(tokens) for tokens in INJECTED.values()]
    history, at = list(prompt), 0
    positions: list[int] = []
    for num_before, tokens in [*happened, (len(answer.token_ids), [])]:
        positions += range(len(history), len(history) + num_before - at)
        history += [*answer.token_ids[at:num_before], *tokens]
        at = num_before
    likeliest = model.logits(history).argmax(-1)
    assert len(answer.token_ids) == NUM_TOKENS
    assert answer.token_ids == likeliest[torch.tensor(positions) - 1].tolist()
    assert answer.finished.usage.prompt_tokens == len(prompt) + sum(map(len, INJECTED.values()))


WAYS = {
    "cached": ({}, {}),
    "chunked, without a cache": ({}, {"max_num_batched_tokens": 20, "enable_prefix_caching": False}),
    "preempted": ({"num_blocks": 20, "max_model_len": 300}, {}),
    "two plans in flight": ({}, {"max_plans_in_flight": 2}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
async def test_the_output_is_that_of_the_history(tiny_model, in_process, start_engine, prompts, backend, way):
    model = tiny_model("llama")
    worker, scheduler = WAYS[way]
    engine = await start_engine(in_process(model.path, backend=backend, **worker), **scheduler)
    requests = [submit(engine, prompt, INJECTED) for prompt in prompts]
    await engine.finish([answer for answer, _ in requests])
    assert engine.stats.preemptions > 0 or way != "preempted"
    for prompt, (answer, happened) in zip(prompts, requests, strict=True):
        check(model, prompt, answer, happened)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_with_drafts(tiny_model, worker_config, in_process_executor, start_engine, prompts, backend):
    model = tiny_model("llama")
    speculation = SpeculationConfig(DraftMethod.NGRAM, 4)
    config = worker_config(model.path, backend=backend, speculation=speculation)
    engine = await start_engine(in_process_executor(config, is_eager=True))
    repeated = [prompt * 3 for prompt in prompts[:4]]
    requests = [submit(engine, prompt, INJECTED, max_drafts=4) for prompt in repeated]
    await engine.finish([answer for answer, _ in requests])
    assert engine.engine.counters.speculation.accepted > 0
    for prompt, (answer, happened) in zip(repeated, requests, strict=True):
        check(model, prompt, answer, happened)


async def test_with_workers_that_die(tiny_model, worker_config, in_process_executor, start_engine, prompts):
    model = tiny_model("llama")
    engine = await start_engine(in_process_executor(worker_config(model.path), deaths=(8, 13, 30)))
    requests = [submit(engine, prompt, INJECTED) for prompt in prompts[:4]]
    await engine.finish([answer for answer, _ in requests])
    assert engine.stats.restarts == 3
    for prompt, (answer, happened) in zip(prompts[:4], requests, strict=True):
        check(model, prompt, answer, happened)


async def test_with_a_killed_worker_process(tiny_model, worker_config, start_engine, prompts):
    model = tiny_model("llama")
    worker = WorkerProcess(worker_config(model.path, backend="cpu"))
    engine = await start_engine(worker)
    answer, happened = submit(engine, prompts[-1], INJECTED)
    while not happened:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    os.kill(worker.pid, signal.SIGKILL)
    await engine.finish([answer])
    assert engine.stats.restarts == 1 or engine.engine.state is EngineState.SERVING
    check(model, prompts[-1], answer, happened)
