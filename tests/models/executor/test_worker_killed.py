"""A worker that is killed while it computes, under an engine: every output is what it would have been."""

import os
import signal
from random import Random

import pytest
from waiting import until

from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import EngineFinishReason

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=100, seed=2**63 + 11, repetition_penalty=1.1)
NUM_TOKENS = 60


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [("float32", GREEDY), ("float64", SAMPLED), ("bfloat16", SAMPLED)],
    ids=["greedy in float32", "sampled in float64", "bfloat16"],
)
async def test_reliability_figure_4_killed_amid_8_streams(
    tiny_model, worker_config, start_engine, prompts, dtype, sampling
):
    worker = WorkerProcess(worker_config(tiny_model("llama").path, dtype=dtype))
    engine = await start_engine(worker)
    expected = [answer.token_ids for answer in await engine.run(prompts, sampling, NUM_TOKENS)]
    answers = [engine.submit(prompt, sampling, NUM_TOKENS) for prompt in prompts]
    num_sent = Random(1).randint(1, NUM_TOKENS // 2)
    await until(lambda: len(answers[0].token_ids) >= num_sent)
    sent = [answer.token_ids.copy() for answer in answers]
    os.kill(worker.pid, signal.SIGKILL)
    await until(lambda: engine.engine.state is EngineState.RECOVERING)
    await until(lambda: engine.engine.state is EngineState.SERVING)
    assert all(answer.token_ids[: len(known)] == known for answer, known in zip(answers, sent, strict=True))
    await engine.engine.wait_idle()
    assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
    assert engine.stats.restarts == 1
    if dtype == "bfloat16":  # in which chunks a history is computed changes its last bits
        assert {len(answer.token_ids) for answer in answers} == {NUM_TOKENS}
    else:
        assert [answer.token_ids for answer in answers] == expected
