"""Models in stages: the tokens and bits of one process, whatever the stages; and what happens when one is lost."""

import os
import signal
from typing import Any

import msgspec
import psutil
import pytest
from grammar_world import DEMO, EOS, KINDS, VOCAB_SIZE
from waiting import until

from penstock.models.backends.base import load_backend
from penstock.models.backends.pipeline_parallel import (
    ModelPart,
    PartWork,
    StageSpeed,
    check_stages,
    divide_layers,
)
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.executor.group import WorkerGroup, new_executor
from penstock.models.executor.process import WorkerProcess
from penstock.models.worker.speculation import check_speculation
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import Pooling, SamplingParams
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(seed=11, temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1)
NGRAM = SpeculationConfig(DraftMethod.NGRAM, 3)
ONE = StageSpeed(14e9, 175e9)
LAYER, HEAD = PartWork(31e6, 15.7e6), PartWork(310e6, 155e6)


async def told(engine, prompts):
    """All that comes of them, to the last bit."""
    answers = [
        *await engine.run(prompts, GREEDY, 12),
        *await engine.run(prompts, SAMPLED, 12),
        *await engine.run(prompts, SCORED, 2),
    ]
    drafted = [engine.submit(prompt[:3] * 6, GREEDY, 16, max_drafts=3) for prompt in prompts]
    vectors = engine.submit_pooled(prompts[:3], Pooling.MEAN)
    await engine.finish(drafted)
    scores = [[number for part in answer.prompt_logprobs for number in part.logprobs.chosen] for answer in answers]
    return [(answer.token_ids, answer.logprobs, answer.tops) for answer in [*answers, *drafted]], scores, vectors.bytes


@pytest.mark.parametrize(
    ("variant", "layers", "config"),
    [
        ("llama", (1, 2), {"dtype": "float32", "num_threads": 4}),
        ("gemma3", (2, 1), {"dtype": "bfloat16"}),
        ("qwen3-moe", (1, 2), {"quantization": "int8", "dtype": "bfloat16"}),
        ("gpt2", (1, 1, 1), {"quantization": "int4", "dtype": "bfloat16"}),
    ],
)
async def test_stages_give_the_bits_of_one_process(
    tiny_model, worker_config, in_process, start_engine, prompts, variant, layers, config
):
    path = tiny_model(variant).path
    config = {"backend": "cpu", "num_blocks": 96, "speculation": NGRAM, **config}
    whole = await start_engine(in_process(path, **config), max_num_batched_tokens=48)
    staged = worker_config(path, **config, pipeline_parallel_size=len(layers), stage_layers=layers)
    engine = await start_engine(new_executor(staged), max_num_batched_tokens=48)
    facts = engine.engine.facts
    assert facts.stage_layers == layers
    assert facts.weight_bytes < whole.engine.facts.weight_bytes
    for ours, expected in zip(await told(engine, prompts), await told(whole, prompts), strict=True):
        assert ours == expected


async def test_grammars_hold_in_stages(worker_config, in_process, start_engine):
    config = {
        "backend": "cpu", "num_blocks": 512, "tokenizer": str(DEMO), "tokenizer_vocab_size": VOCAB_SIZE,
        "eos_token_ids": EOS, "special_tokens": (), "max_model_len": 512,
    }  # fmt: skip
    sampling = SamplingParams(temperature=1.0, seed=5, stop_token_ids=EOS)
    outputs = []
    for executor in (
        in_process(DEMO, **config),
        new_executor(worker_config(DEMO, **config, pipeline_parallel_size=2, stage_layers=(3, 3))),
    ):
        engine = await start_engine(executor)
        answers = [
            engine.submit([7, 100 + number, 30], sampling, 40, grammar=grammar, max_drafts=4)
            for number, grammar in enumerate(KINDS.values())
        ]
        await engine.finish(answers)
        outputs.append([answer.token_ids for answer in answers])
    assert outputs[0] == outputs[1]


async def test_a_stage_is_killed_amid_streams(tiny_model, worker_config, in_process, start_engine, prompts, caplog):
    path = tiny_model("llama").path
    greedy = SamplingParams(temperature=0.0)
    whole = await start_engine(in_process(path, backend="cpu"))
    expected = [answer.token_ids for answer in await whole.run(prompts, greedy, 40)]
    group = WorkerGroup(worker_config(path, backend="cpu", pipeline_parallel_size=2))
    engine = await start_engine(group)
    workers: Any = group._workers
    pids = [worker.pid for worker in workers]
    layers = engine.engine.facts.stage_layers
    assert len(layers) == 2, "divided by what was measured"
    assert sum(layers) == 3
    answers = [engine.submit(prompt, greedy, 40) for prompt in prompts]
    await until(lambda: len(answers[0].token_ids) > 5)
    os.kill(pids[1], signal.SIGKILL)
    await until(lambda: engine.engine.state is EngineState.RECOVERING)
    await engine.engine.wait_idle()
    assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
    assert [answer.token_ids for answer in answers] == expected
    assert "rank 1: the worker was ended by SIGKILL" in caplog.text
    assert not any(map(psutil.pid_exists, pids))
    assert engine.engine.facts.stage_layers == layers, "they are divided once"


async def test_a_stage_that_cannot_load_names_the_cause(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, backend="cpu", pipeline_parallel_size=2, stage_layers=(1, 2))
    group = WorkerGroup(config)
    second: Any = group._workers[1]
    group._workers[1] = WorkerProcess(msgspec.structs.replace(second._config, max_memory_bytes=1))
    with pytest.raises(ExecutorError, match=r"its weights need .* and cpu has 0.00 MiB free"):
        await group.start()


@pytest.mark.parametrize(
    ("variant", "stages", "says"),
    [
        ("llama", 4, "--pipeline-parallel-size 4: the model has 3 layers, and each stage needs one: give fewer$"),
        ("gemma4-inputs", 2, "every layer of .* has inputs of its own, .*: leave it out$"),
    ],
)
def test_models_that_cannot_be_divided_say_why(tiny_model, variant, stages, says):
    with pytest.raises(ModelError, match=says):
        check_stages(check_checkpoint(tiny_model(variant).path).spec, stages)


@pytest.mark.parametrize("backend", ["reference", "transformers"])
def test_backends_without_stages_refuse_them(tiny_model, worker_config, backend):
    config = worker_config(tiny_model("llama").path, backend=backend, pipeline_parallel_size=2)
    with pytest.raises(ModelError, match=r"--pipeline-parallel-size is 2, .*: leave that out, or give --backend cpu"):
        load_backend(config)


def test_a_head_that_reads_layers_of_other_stages_is_refused(worker_config, tiny_model):
    speculation = SpeculationConfig(DraftMethod.EAGLE3, 2, model="head")
    config = worker_config(tiny_model("llama").path, pipeline_parallel_size=2, speculation=speculation)
    with pytest.raises(ModelError, match="a head reads hidden states that other stages compute"):
        check_speculation(config)


@pytest.mark.parametrize(
    ("speeds", "layers"),
    [
        ([ONE], (28,)),
        ([ONE, ONE], (12, 16)),
        ([ONE, StageSpeed(28e9, 350e9)], (7, 21)),
        ([ONE, ONE, ONE, ONE], (4, 8, 8, 8)),
    ],
)
def test_layers_are_divided_by_time(speeds, layers):
    assert divide_layers([LAYER] * 28, HEAD, speeds) == layers


def test_each_stage_has_a_layer_even_if_the_head_takes_all_the_time():
    assert divide_layers([LAYER] * 3, PartWork(1e12, 1e9), [ONE] * 3) == (1, 1, 1)


def test_parts_are_the_whole():
    parts = [ModelPart.of_stage(stage, (3, 1, 2)) for stage in range(3)]
    assert [list(part.layers) for part in parts] == [[0, 1, 2], [3], [4, 5]]
    assert [part.has_ends for part in parts] == [True, False, False]
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.3.mlp.up_proj.weight"):
        assert sum(part.has(name) for part in parts) == 1
