"""Models whose windowed layers have blocks of their own give transformers' greedy output, token for token in fp32,
however a request is batched, cut, cached, preempted or drafted."""

import asyncio
import os
import signal

import pytest
import torch
from waiting import until

from penstock.models.executor.group import new_executor
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams

# numpy warns where Triton's interpreter computes infinities, as a GPU does.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 24
WINDOW, NUM_BEFORE = 9, 1
"""Each of these models has three layers, two of them with this window: a group each. A border has a block before it."""
BUDGET = 32


@pytest.fixture(params=["gemma3", "gpt-oss", pytest.param("llama4", marks=pytest.mark.soak)])
def model(request, tiny_model):
    return tiny_model(request.param)


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.soak)])
def backend(request):
    return request.param


@pytest.fixture
def executor(in_process, model, backend):
    def new(**config):
        limits = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "max_model_len": 400}
        config.setdefault("device", DEVICE if backend == "cuda" else "cpu")
        return in_process(model.path, backend=backend, frees_windows=True, **limits | config)

    return new


def check(model, prompt, token_ids, num_tokens=NUM_TOKENS):
    """The output is the greedy continuation."""
    assert len(token_ids) == num_tokens
    logits = model.logits(prompt + token_ids)[len(prompt) - 1 : -1]
    assert token_ids == logits.argmax(-1).tolist()


def long_prompt(length, seed=0):
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def test_batched_and_in_chunks(model, executor, start_engine, prompts):
    engine = await start_engine(executor(), enable_prefix_caching=False)
    assert engine.engine.facts.num_window_groups == 2
    assert engine.engine.facts.window == WINDOW
    many = [*prompts, long_prompt(200), long_prompt(150, 1)]
    answers = await engine.run(many, GREEDY, NUM_TOKENS)
    for prompt, answer in zip(many, answers, strict=True):
        check(model, prompt, answer.token_ids)


async def test_a_conversation_is_cached_and_its_windows_stay_small(model, executor, start_engine):
    engine = await start_engine(executor())
    pool = engine.engine._scheduler.kv.pool
    history = long_prompt(100)
    for turn in range(4):
        answer = engine.submit(history, GREEDY, NUM_TOKENS)
        held = []
        while answer.finished is None:
            await asyncio.sleep(0)
            held.append(pool.num_blocks - pool.num_free)
        check(model, history, answer.token_ids)
        assert turn == 0 or answer.finished.usage.cached_tokens >= len(history) - 20 - 16 - 1
        history = history + answer.token_ids + long_prompt(20, turn)
        of_group_0 = -(-(len(history) - 20) // 16)
        assert max(held) <= of_group_0 + 2 * (NUM_BEFORE + BUDGET // 16 + 1)


async def test_choices_share_the_window_of_their_prompt(model, executor, start_engine):
    prompt = long_prompt(120)
    engine = await start_engine(executor())
    answer = engine.submit(prompt, GREEDY, NUM_TOKENS, n=3)
    await engine.finish([answer])
    assert engine.stats.prefill_tokens <= 120 + 2 * 16
    check(model, prompt, answer.token_ids[:NUM_TOKENS])


async def test_preempted(model, executor, start_engine):
    per_block = 16 * _bytes_per_token(model)
    engine = await start_engine(executor(kv_cache_bytes=30 * per_block, max_model_len=240))
    many = [long_prompt(70 + 10 * number, number) for number in range(6)]
    answers = [engine.submit(prompt, GREEDY, 60) for prompt in many]
    await engine.finish(answers)
    assert engine.stats.preemptions > 0
    for prompt, answer in zip(many, answers, strict=True):
        check(model, prompt, answer.token_ids, 60)


async def test_drafted(model, backend, in_process_executor, worker_config, start_engine):
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 400}
    device = DEVICE if backend == "cuda" else "cpu"
    config = worker_config(model.path, backend=backend, frees_windows=True, device=device, **limits)
    engine = await start_engine(in_process_executor(config, is_eager=True))
    prompts = [long_prompt(80), long_prompt(130, 1)]
    plain = await engine.run(prompts, GREEDY, 60)
    for prompt, answer in zip(prompts, plain, strict=True):
        check(model, prompt, answer.token_ids, 60)
    # Right at first, then wrong: rejected drafts are written beside the window.
    drafts = [[*answer.token_ids[:30], 1, 2, 3, *answer.token_ids[31:]] for answer in plain]
    again = [
        engine.submit([7, *prompt], GREEDY, 60, max_drafts=6, prediction=draft)
        for prompt, draft in zip(prompts, drafts, strict=True)
    ]
    await engine.finish(again)
    for prompt, answer in zip(prompts, again, strict=True):
        check(model, [7, *prompt], answer.token_ids, 60)


async def test_on_a_gpu(tiny_model, in_process, start_engine):
    """In chunks, and after a prefix; in Triton's interpreter if there is no GPU."""
    model = tiny_model("gemma3")
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 1, "max_model_len": 96, "uses_predictions": False}
    engine = await start_engine(in_process(model.path, backend="cuda", frees_windows=True, device=DEVICE, **limits))
    prompt = long_prompt(34)
    for _ in range(2):
        [answer] = await engine.run([prompt], GREEDY, 2)
        check(model, prompt, answer.token_ids, 2)
    assert answer.finished.usage.cached_tokens == 32


async def test_a_worker_that_is_killed(tiny_model, worker_config, start_engine):
    model = tiny_model("gemma3")
    limits = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 4}
    worker = WorkerProcess(worker_config(model.path, backend="cpu", frees_windows=True, **limits))
    engine = await start_engine(worker)
    prompt = long_prompt(100)
    answer = engine.submit(prompt, GREEDY, 60)
    await until(lambda: len(answer.token_ids) >= 20)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: engine.stats.restarts == 1 and engine.engine.state is EngineState.SERVING)
    await engine.finish([answer])
    assert engine.engine.facts.num_window_groups == 2
    check(model, prompt, answer.token_ids, 60)


async def test_evicted_windows_come_back_from_host_memory(model, executor, start_engine, backend):
    if backend == "cpu":
        pytest.skip("its cache is in host memory already")
    per_block = 16 * _bytes_per_token(model)
    sizes = {"kv_cache_bytes": 40 * per_block, "host_kv_cache_bytes": 300 * per_block, "max_model_len": 240}
    engine = await start_engine(executor(**sizes))
    many = [long_prompt(100, number) for number in range(6)]
    for prompt in many * 2:
        [answer] = await engine.run([prompt], GREEDY, 8)
        check(model, prompt, answer.token_ids, 8)
    assert engine.stats.restored_tokens > 0


@pytest.mark.soak
async def test_shared_by_two_ranks(model, worker_config, start_engine):
    limits = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "tensor_parallel_size": 2}
    config = worker_config(model.path, backend="reference", frees_windows=True, **limits)
    engine = await start_engine(new_executor(config))
    assert engine.engine.facts.num_window_groups == 2
    many = [long_prompt(200), long_prompt(90, 1)]
    answers = await engine.run(many, GREEDY, NUM_TOKENS)
    for prompt, answer in zip(many, answers, strict=True):
        check(model, prompt, answer.token_ids)


def _bytes_per_token(model):
    """Returns the bytes of a token in the layers of one group, in fp32."""
    config = model.module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * config.num_key_value_heads * (-(-head_dim // 16) * 16)
