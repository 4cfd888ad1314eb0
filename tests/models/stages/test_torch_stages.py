"""Stages in plain torch, also with several ranks each: the tokens of one process."""

import os
import signal
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from grammar_world import DEMO, EOS, KINDS, VOCAB_SIZE
from hosts.stage_ranks import StagedExecutor, ThreadJoin, serving_ranks
from waiting import until

from penstock.models.backends.base import load_backend
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.backends.reference import backend as reference
from penstock.models.backends.stage_part import StageRows
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.stages import num_loaded
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.executor.group import WorkerGroup
from penstock.models.worker.speculation import check_speculation
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import Pooling, SamplingParams
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.worker_config import DraftMethod, Meeting, SpeculationConfig, WorkerConfig

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(
    seed=11, temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2, min_tokens=4, stop_token_ids=(3, 4),
    bad_words=((5, 6), (7,), (8, 9, 10)), logprobs=0,
)  # fmt: skip
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1)
NGRAM = SpeculationConfig(DraftMethod.NGRAM, 3)


@pytest.fixture
def start_stages(worker_config, start_engine, tmp_path, monkeypatch):
    """Starts an engine over rank 0, with the other ranks in threads: ``await start_stages(path, layers, **config)``."""
    with ExitStack() as stack:

        async def start(path, layers, num_parts=1, **config):
            ranks = worker_config(
                path, **config, pipeline_parallel_size=len(layers), tensor_parallel_size=num_parts, stage_layers=layers,
                meeting=Meeting(str(tmp_path)),
            )  # fmt: skip
            monkeypatch.setattr(reference, "join", ThreadJoin(ranks))
            stack.enter_context(serving_ranks(ranks))
            executor = StagedExecutor(ranks)
            stack.callback(executor.close_links)
            return await start_engine(executor, max_num_batched_tokens=48)

        yield start


async def told(engine, prompts):
    """All that comes of them: ids, and what is a number."""
    answers = [
        *await engine.run(prompts, GREEDY, 12),
        *await engine.run(prompts, SAMPLED, 12),
        *await engine.run(prompts, SCORED, 2),
    ]
    drafted = [engine.submit(prompt[:3] * 6, GREEDY, 16, max_drafts=3) for prompt in prompts]
    vectors = engine.submit_pooled(prompts[:3], Pooling.MEAN)
    await engine.finish(drafted)
    numbers = [number for answer in [*answers, *drafted] for number in answer.logprobs]
    numbers += [number for answer in answers for part in answer.prompt_logprobs for number in part.logprobs.chosen]
    return [answer.token_ids for answer in [*answers, *drafted]], numbers, np.concatenate(vectors.arrays())


@pytest.mark.parametrize(
    ("variant", "num_stages", "num_parts"),
    [
        ("llama", 2, 1),
        ("llama", 2, 2),
        ("deepseek-v3", 2, 1),
        pytest.param("gpt2", 3, 1, marks=pytest.mark.soak),
        pytest.param("gemma3", 2, 1, marks=pytest.mark.soak),
        pytest.param("olmo2", 2, 2, marks=pytest.mark.soak),
        pytest.param("qwen2-moe", 2, 2, marks=pytest.mark.soak),
    ],
)
async def test_stages_give_the_tokens_of_one_process(
    tiny_model, in_process, start_engine, start_stages, prompts, variant, num_stages, num_parts
):
    path = tiny_model(variant).path
    spec = check_checkpoint(path).spec
    layers = (1,) * (num_stages - 1) + (spec.num_layers - num_stages + 1,)
    whole = await start_engine(in_process(path, num_blocks=96), max_num_batched_tokens=48)
    engine = await start_stages(path, layers, num_parts, num_blocks=96, speculation=NGRAM)
    facts = engine.engine.facts
    assert (facts.stage_layers, facts.tensor_parallel_size) == (layers, num_parts)
    assert facts.weight_bytes < whole.engine.facts.weight_bytes
    ids, *ours = await told(engine, prompts)
    expected_ids, *expected = await told(whole, prompts)
    assert ids == expected_ids
    for numbers, expected_numbers in zip(ours, expected, strict=True):
        assert numbers == pytest.approx(expected_numbers, abs=1e-4)


async def test_grammars_hold_in_stages(in_process, start_engine, start_stages):
    config = {
        "num_blocks": 256, "tokenizer": str(DEMO), "tokenizer_vocab_size": VOCAB_SIZE, "eos_token_ids": EOS,
        "special_tokens": (), "max_model_len": 512,
    }  # fmt: skip
    sampling = SamplingParams(temperature=1.0, seed=5, stop_token_ids=EOS)
    outputs = []
    for engine in (await start_engine(in_process(DEMO, **config)), await start_stages(DEMO, (3, 3), **config)):
        answers = [
            engine.submit([7, 100 + number, 30], sampling, 24, grammar=grammar, max_drafts=4)
            for number, grammar in enumerate(KINDS.values())
        ]
        await engine.finish(answers)
        outputs.append([answer.token_ids for answer in answers])
    assert outputs[0] == outputs[1]


async def test_a_draft_model_is_whole_on_rank_0(tiny_model, in_process, start_engine, start_stages, prompts):
    path = tiny_model("llama").path
    speculation = SpeculationConfig(DraftMethod.DRAFT_MODEL, 3, model=str(path))
    whole = await start_engine(in_process(path, num_blocks=96))
    engine = await start_stages(path, (1, 2), num_blocks=192, speculation=speculation)
    expected = [whole.submit(prompt, GREEDY, 12) for prompt in prompts]
    answers = [engine.submit(prompt, GREEDY, 12, max_drafts=3) for prompt in prompts]
    await engine.finish(answers)
    await whole.finish(expected)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


@pytest.mark.soak
async def test_ranks_of_stages_are_killed_amid_streams(
    tiny_model, worker_config, in_process, start_engine, prompts, caplog
):
    path = tiny_model("llama").path
    greedy = SamplingParams(temperature=0.0)
    whole = await start_engine(in_process(path))
    expected = [answer.token_ids for answer in await whole.run(prompts, greedy, 40)]
    group: Any = WorkerGroup(worker_config(path, tensor_parallel_size=2, pipeline_parallel_size=2))
    engine = await start_engine(group)
    layers = engine.engine.facts.stage_layers
    assert sum(layers) == 3, "divided by what was measured"
    pids = [worker.pid for worker in group._workers]
    answers = [engine.submit(prompt, greedy, 40) for prompt in prompts]
    await until(lambda: len(answers[0].token_ids) > 5)
    os.kill(pids[3], signal.SIGKILL)
    await until(lambda: engine.engine.state is EngineState.RECOVERING)
    await engine.engine.wait_idle()
    assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
    assert [answer.token_ids for answer in answers] == expected
    assert "rank 3: the worker was ended by SIGKILL" in caplog.text
    assert not any(map(psutil.pid_exists, pids))
    assert engine.engine.facts.stage_layers == layers


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_ranks_parts_are_the_whole(tiny_model, load_format):
    info = check_checkpoint(tiny_model("llama").path, weights=load_format == "auto")
    settings = (info, torch.float32, torch.device("cpu"), load_format, 160)
    whole: Any = load_weights(*settings)
    first, second = ModelPart(range(1)), ModelPart(range(1, 3), has_ends=False)
    ends: Any = load_weights(*settings, part=first)
    layers: Any = load_weights(*settings, part=second)
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.head.weight, whole.head.weight)
    assert torch.equal(layers.layers[1].mlp.down.weight, whole.layers[2].mlp.down.weight)
    assert ends.num_bytes + layers.num_bytes == whole.num_bytes + whole.norm.weight.nbytes
    assert ends.num_bytes == 4 * num_loaded(info.spec, 160, first)
    assert layers.embedding.numel() == 0


def test_a_rank_sees_which_blocks_a_batch_begins():
    rows = StageRows(
        starts=np.array([0, 15, 16, 17]),
        ends=np.array([33, 16, 17, 18]),
        token_starts=np.array([0, 33, 34, 35, 36]),
        tables=np.array([[7, 3, 9, 0], [1, 0, 0, 0], [2, 4, 0, 0], [5, 6, 0, 0]]),
        block_size=16,
    )
    assert rows.fresh_blocks() == [7, 3, 9, 4]
    assert rows.positions.tolist() == [*range(33), 15, 16, 17]
    assert rows.slots.tolist()[-3:] == [31, 64, 97]


def test_with_stages_only_rank_0_drafts_so_several_ranks_may(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, tensor_parallel_size=2, speculation=NGRAM)
    with pytest.raises(ModelError, match=r"give --pipeline-parallel-size too, with which only rank 0 drafts$"):
        check_speculation(config)
    staged = WorkerConfig("model", tensor_parallel_size=2, pipeline_parallel_size=2, speculation=NGRAM)
    assert check_speculation(staged) is staged
    assert staged.drafts_predictions


def test_a_host_tier_is_refused(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, pipeline_parallel_size=2, host_kv_cache_bytes=1 << 20)
    with pytest.raises(ModelError, match=r"--host-kv-cache-bytes: does not work with .*: leave it out$"):
        load_backend(config)
