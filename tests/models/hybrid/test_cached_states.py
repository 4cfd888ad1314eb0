"""Hybrids with the scheduler's own slots: prefixes from the cache, turns of a conversation, drafts and a worker that is
killed leave transformers' greedy output as it is."""

import os
import signal

import pytest
from waiting import until

from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 24


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.soak)], indirect=True)
async def test_turns_of_conversations(typical_hybrid, backend, in_process, start_engine, prompts, check_greedy):
    """Each turn computes its own tokens, and at most a block of those before."""
    executor = in_process(typical_hybrid.path, backend=backend)
    engine = await start_engine(executor, max_num_batched_tokens=32)
    histories = [list(prompt) for prompt in prompts]
    for turn in range(4):
        answers = await engine.run(histories, GREEDY, NUM_TOKENS)
        for history, answer in zip(histories, answers, strict=True):
            check_greedy(typical_hybrid, history, answer.token_ids)
            if turn:
                # The last token of the answer before was never computed, and 7 tokens are new.
                assert answer.finished.usage.cached_tokens >= len(history) - 7 - 1 - 16
            history += answer.token_ids + prompts[-1][turn : turn + 7]
    assert engine.stats.state_hits == 3 * len(prompts)


async def test_a_branch_costs_two_requests(typical_hybrid, backend, in_process, start_engine, prompts, check_greedy):
    shared = prompts[-1][:64]
    engine = await start_engine(in_process(typical_hybrid.path, backend=backend))
    cached = []
    for end in range(3):
        prompt = shared + prompts[5][end : end + 20]
        [answer] = await engine.run([prompt], GREEDY, NUM_TOKENS)
        check_greedy(typical_hybrid, prompt, answer.token_ids)
        cached.append(answer.finished.usage.cached_tokens)
    assert cached == [0, 0, 64]


async def test_preempted_rows_go_on_from_their_states(
    typical_hybrid, backend, knowing_executor, start_engine, prompts, check_greedy
):
    executor = knowing_executor(typical_hybrid.path, backend=backend, num_blocks=18, max_model_len=200)
    engine = await start_engine(executor)
    for _ in range(2):
        answers = await engine.run(prompts[3:], GREEDY, NUM_TOKENS)
        for prompt, answer in zip(prompts[3:], answers, strict=True):
            check_greedy(typical_hybrid, prompt, answer.token_ids)
    assert engine.stats.preemptions > 0


async def test_drafts_across_borders(typical_hybrid, backend, knowing_executor, start_engine, prompts, check_greedy):
    engine = await start_engine(knowing_executor(typical_hybrid.path, backend=backend), enable_prefix_caching=False)
    plain = await engine.run(prompts[3:], GREEDY, 40)
    known = {tuple(prompt): answer.token_ids for prompt, answer in zip(prompts[3:], plain, strict=True)}
    engine = await start_engine(knowing_executor(typical_hybrid.path, known, backend=backend))
    for _ in range(2):
        answers = [engine.submit(prompt, GREEDY, 40, max_drafts=6) for prompt in prompts[3:]]
        await engine.finish(answers)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert all(answer.finished.speculation.accepted for answer in answers)
    # The state at a border that only accepted drafts have passed.
    for prompt, answer in zip(prompts[3:], plain, strict=True):
        longer = prompt + answer.token_ids
        known[tuple(longer)] = []
        [next_answer] = await engine.run([longer], GREEDY, 8)
        check_greedy(typical_hybrid, longer, next_answer.token_ids)
        assert next_answer.finished.usage.cached_tokens >= len(longer) - 1 - 16


@pytest.mark.parametrize(
    "name", ["qwen3-next", *(pytest.param(name, marks=pytest.mark.soak) for name in ("lfm2", "falcon-h1"))]
)
async def test_a_worker_that_is_killed(hybrid, name, backend, worker_config, start_engine, prompts, check_greedy):
    model = hybrid(name)
    worker = WorkerProcess(worker_config(model.path, backend=backend))
    engine = await start_engine(worker)
    await engine.run(prompts, GREEDY, 4)
    answers = [engine.submit(prompt, GREEDY, 60) for prompt in prompts]
    await until(lambda: len(answers[0].token_ids) >= 20)
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: engine.stats.restarts == 1 and engine.engine.state is EngineState.SERVING)
    await engine.finish(answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        check_greedy(model, prompt, answer.token_ids)
