"""A model that ranks share gives the tokens that one process gives; when a rank ends, all of them are replaced."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from torch import distributed
from waiting import until

from penstock.models.backends.base import load_backend
from penstock.models.backends.tensor_parallel import SingleRank
from penstock.models.backends.torch_common import loader
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.sources import FileSource
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.errors import ModelError
from penstock.models.executor.group import WorkerGroup, new_executor
from penstock.models.executor.spawn import QUIET
from penstock.models.executor.wire import FrameKind, encode_frame
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import SamplingParams, StepPlan
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.worker_config import Meeting, WorkerConfig

GREEDY = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=100, seed=2**63 + 11, repetition_penalty=1.1)
VOCAB_SIZE = 159
"""Of the tokenizer: the ranks' parts differ."""

FAMILIES = (
    "llama-tied-biases-head24",
    "qwen3",
    "gemma2",
    "gemma4-inputs",
    "mixtral",
    "olmo2",
    "gpt-oss",
    "cohere-qk-norm",
    "phi",
    "glm4-moe",
    "llama4",
    "qwen2-moe",
)
OTHER_RANK = """
import socket, sys
from torch import distributed
from penstock.models.executor.wire import Channel
from penstock.models.worker.main import serve

for descriptor in sys.argv[1:]:
    with socket.socket(fileno=int(descriptor)) as connection:
        serve(Channel(connection))
    if distributed.is_initialized():
        distributed.destroy_process_group()
"""
"""Rank 1 of one model after the other, a socket each: what a worker does, but that it need not import torch again."""
PLAN = StepPlan(0, [], [], [], [], [])


class Rank(SingleRank):
    """One that has nothing to say."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


class RankZero:
    """This process as rank 0, beside another one."""

    def __init__(self, inner, connection):
        self._inner, self._connection = inner, connection

    async def start(self):
        other = msgspec.structs.replace(self._inner._config, tensor_parallel_rank=1, measures_steps=False)
        self._connection.sendall(encode_frame(FrameKind.CONFIG, other))
        facts = await self._inner.start()
        self._inner._runner.warm()
        return facts

    def submit(self, plan):
        self._connection.sendall(encode_frame(FrameKind.PLAN, plan))
        self._inner.submit(plan)

    def results(self):
        return self._inner.results()

    async def stop(self):
        await self._inner.stop()
        self._connection.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()


@pytest.fixture(scope="module")
def connections():
    """To rank 1 of each model."""
    pairs = [socket.socketpair() for _ in (*FAMILIES, "on kernels")]
    descriptors = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-P", "-c", OTHER_RANK, *map(str, descriptors)]
    with subprocess.Popen(command, pass_fds=descriptors, env={**QUIET, **os.environ}) as process:
        for _, theirs in pairs:
            theirs.close()
        yield (ours for ours, _ in pairs)
        for ours, _ in pairs:
            ours.close()
    assert process.returncode == 0


async def told(engine, prompts):
    """All that comes of them: ids, and what is a number."""
    greedy = await engine.run(prompts, GREEDY, 16)
    sampled = await engine.run(prompts, SAMPLED, 16)
    ids = [answer.token_ids for answer in [*greedy, *sampled]]
    tops = [top for answer in greedy for top, _ in answer.tops]
    numbers = [number for answer in greedy for number in answer.logprobs]
    numbers += [number for answer in greedy for part in answer.prompt_logprobs for number in part.logprobs.chosen]
    return ids, tops, numbers


@pytest.mark.parametrize("variant", FAMILIES)
async def test_two_ranks_give_what_one_process_gives(
    tiny_model, in_process, start_engine, prompts, connections, tmp_path, variant
):
    path = tiny_model(variant).path
    prompts = [[min(token, VOCAB_SIZE - 1) for token in prompt] for prompt in prompts]
    config = {"num_blocks": 128, "tokenizer_vocab_size": VOCAB_SIZE}
    whole = await start_engine(in_process(path, **config))
    shared = in_process(path, **config, tensor_parallel_size=2, meeting=Meeting(str(tmp_path)))
    engine = await start_engine(RankZero(shared, next(connections)), max_num_batched_tokens=48)
    ids, tops, numbers = await told(engine, prompts)
    expected_ids, expected_tops, expected_numbers = await told(whole, prompts)
    assert ids == expected_ids
    assert tops == expected_tops
    assert numbers == pytest.approx(expected_numbers, abs=1e-4)
    facts, whole_facts = engine.engine.facts, whole.engine.facts
    assert facts.tensor_parallel_size == 2
    assert facts.weight_bytes < 0.8 * whole_facts.weight_bytes
    # A block takes half the bytes.
    assert facts.num_blocks // 2 == whole_facts.num_blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about the kernels in Triton's interpreter")
async def test_on_the_backend_for_gpus_too(build_model, in_process, start_engine, connections, tmp_path):
    pytest.importorskip("triton")
    tiny = {"num_hidden_layers": 1, "vocab_size": 33, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    path = build_model(tmp_path / "olmo2", "Olmo2Config", tiny).path
    config = {"num_blocks": 3, "max_model_len": 16, "max_num_seqs": 1}
    whole = await start_engine(in_process(path, **config))
    ranks = {"tensor_parallel_size": 2, "meeting": Meeting(str(tmp_path))}
    shared = in_process(path, **config, **ranks, backend="cuda", max_num_batched_tokens=16)
    engine = await start_engine(RankZero(shared, next(connections)))
    [ours], [expected] = [await each.run([[7, 3, 15, 21, 9]], SAMPLED, 3) for each in (engine, whole)]
    assert ours.token_ids == expected.token_ids
    assert (engine.engine.facts.backend, engine.engine.facts.tensor_parallel_size) == ("cuda", 2)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_ranks_parts_are_the_whole(tiny_model, load_format):
    info = check_checkpoint(tiny_model("llama-tied-biases-head24").path, weights=load_format == "auto")
    settings = (info, torch.float32, torch.device("cpu"), load_format, VOCAB_SIZE)
    whole: Any = load_weights(*settings)
    parts: list[Any] = [load_weights(*settings, Rank(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part.head.weight for part in parts]), whole.head.weight, rtol=0, atol=0)
    mlp, layers = whole.layers[1].mlp, [part.layers[1] for part in parts]
    for half in range(2):  # gate and up
        gates = [layer.mlp.gate_up.weight.chunk(2)[half] for layer in layers]
        assert torch.equal(torch.cat(gates), mlp.gate_up.weight.chunk(2)[half])
    assert torch.equal(torch.cat([layer.mlp.down.weight for layer in layers], dim=1), mlp.down.weight)
    assert torch.equal(layers[0].mlp.down.bias, mlp.down.bias)
    assert layers[1].mlp.down.bias is None
    assert torch.equal(layers[1].output.weight, whole.layers[1].output.weight[:, 48:])
    assert torch.equal(layers[1].before_mlp.weight, whole.layers[1].before_mlp.weight)


@pytest.mark.parametrize("variant", ["llama", "llama-tied-biases-head24"])
@pytest.mark.parametrize("size", [1, 2])
def test_weights_are_counted_as_they_are_loaded(tiny_model, variant, size):
    info = check_checkpoint(tiny_model(variant).path)
    settings = (info, torch.float32, torch.device("cpu"), "auto", VOCAB_SIZE)
    counted = info.spec.divided(size).num_loaded(VOCAB_SIZE, size)
    loaded = [load_weights(*settings, Rank(rank, size)).num_bytes // 4 for rank in range(size)]
    assert max(loaded) == counted


def test_of_a_quantised_weight_a_rank_takes_its_part(monkeypatch):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    monkeypatch.setattr(loader, "read_matrix", lambda linear: SimpleNamespace(dequantized=lambda: values))
    out = torch.empty(3, 2)
    info: Any = SimpleNamespace(tensors={}, quantized={"down": "the linear"})
    source = FileSource(info)
    source.fill("down.weight", out, (slice(None), slice(2, 4)))
    assert out.tolist() == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize(
    ("variant", "size", "says"),
    [
        ("llama", 3, "--tensor-parallel-size 3: the model has 2 key and value heads, .*: give 2, or leave it out$"),
        ("gemma3", 2, "1 key and value heads, .*: leave it out$"),
        ("llama-tied-biases-head24", 8, "4 key and value heads, .*: give 2 or 4, or leave it out$"),
        ("qwen2-some-windows", 64, "4 key and value heads"),
    ],
)
def test_sizes_that_do_not_divide_name_the_flag_and_those_that_do(tiny_model, worker_config, variant, size, says):
    with pytest.raises(ModelError, match=says):
        load_backend(worker_config(tiny_model(variant).path, tensor_parallel_size=size))


def test_experts_are_divided_by_their_width(tiny_model):
    spec = check_checkpoint(tiny_model("qwen3-moe").path).spec
    experts = spec.experts
    assert experts is not None
    assert spec.divided(2).experts == dataclasses.replace(experts, intermediate_size=20)
    odd = dataclasses.replace(spec, experts=dataclasses.replace(experts, intermediate_size=41))
    with pytest.raises(ModelError, match="41 inner columns of an expert"):
        odd.divided(2)


def test_the_cpu_backend_refuses_several_ranks(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, backend="cpu", tensor_parallel_size=2)
    with pytest.raises(ModelError, match=r"--backend cpu: --tensor-parallel-size is 2, .*: leave that out"):
        load_backend(config)


def test_ranks_have_a_gpu_each_and_share_a_host(tmp_path):
    config = WorkerConfig(str(tmp_path), device="cuda", num_threads=5, max_memory_bytes=100, tensor_parallel_size=2)
    group = new_executor(config)
    assert isinstance(group, WorkerGroup)
    workers: Any = group._workers
    first, second = (worker._config for worker in workers)
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert (first.tensor_parallel_rank, second.tensor_parallel_rank) == (0, 1)
    assert {(rank.num_threads, rank.max_memory_bytes) for rank in (first, second)} == {(2, 50)}
    assert first.meeting == second.meeting


async def test_a_rank_is_killed_amid_8_streams(tiny_model, worker_config, in_process, start_engine, prompts, caplog):
    path = tiny_model("llama").path
    greedy = SamplingParams(temperature=0.0)
    whole = await start_engine(in_process(path))
    expected = [answer.token_ids for answer in await whole.run(prompts, greedy, 40)]
    group: Any = WorkerGroup(worker_config(path, tensor_parallel_size=2))
    engine = await start_engine(group)
    pids = [worker.pid for worker in group._workers]
    assert group._directory.stat().st_mode & 0o777 == 0o700
    answers = [engine.submit(prompt, greedy, 40) for prompt in prompts]
    await until(lambda: len(answers[0].token_ids) > 5)
    os.kill(pids[1], signal.SIGKILL)
    await until(lambda: engine.engine.state is EngineState.RECOVERING)
    await engine.engine.wait_idle()
    assert {answer.finished.reason for answer in answers} == {EngineFinishReason.LENGTH}
    assert [answer.token_ids for answer in answers] == expected
    assert engine.stats.restarts == 1
    # The other rank, which noticed sooner than we, did not say so.
    assert "rank 1: the worker was ended by SIGKILL" in caplog.text
    assert not any(map(psutil.pid_exists, pids))
    await engine.engine.stop()
    assert not group._directory.exists()


@pytest.fixture
async def group(without_model):
    """Two ranks without a model, which is theirs to speak of."""
    without_model()
    group = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=2))
    await group.start()
    yield group
    await group.stop()


async def end_of(group):
    """What is said of its end; all of its processes have ended when another one starts."""
    pids = [worker.pid for worker in group._workers]
    with pytest.raises(ExecutorError) as caught:
        await anext(group.results())
    with pytest.raises(ExecutorError) as refused:
        group.submit(PLAN)
    assert str(refused.value) == str(caught.value)
    await group.stop()
    assert not any(map(psutil.pid_exists, pids))
    await group.start()
    group.submit(PLAN)
    assert (await anext(group.results())).step == PLAN.step
    return caught.value


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_the_group_without_blaming_the_step(group, rank):
    os.kill(group._workers[rank].pid, signal.SIGKILL)
    error = await end_of(group)
    assert f"rank {rank}: the worker was ended by SIGKILL" in str(error)
    assert not error.blames_step


async def test_a_rank_that_hangs_is_found(group):
    os.kill(group._workers[1].pid, signal.SIGSTOP)
    assert str(await end_of(group)) == "rank 1: the worker was stopped by a signal"


async def test_what_rank_0_answered_comes_before_the_failure_of_another(group):
    group._workers[0].submit(PLAN)
    group._workers[1].submit(StepPlan(1, [5], [], [], [], []))
    await until(lambda: group._lost is not None)
    results = group.results()
    group._workers[0].submit(StepPlan(1, [], [], [], [], []))
    assert [(await anext(results)).step, (await anext(results)).step] == [0, 1]
    error = await end_of(group)
    assert "rank 1: the worker failed: AssertionError: row 5" in str(error)
    assert error.blames_step


async def test_a_step_that_takes_too_long_condemns_all_ranks(group):
    group.kill("a step took 31 s")
    group.kill("and again")
    error = await end_of(group)
    assert str(error) == "a step took 31 s"
    assert error.blames_step


async def test_a_group_stops_twice_and_ends_its_results(group):
    ended = asyncio.ensure_future(anext(group.results(), "ended"))
    await asyncio.sleep(0)
    await group.stop()
    await group.stop()
    assert await ended == "ended"
    group.kill("nobody")


async def test_a_ranks_refusal_of_the_model_is_reported_once(without_model):
    others = set(psutil.Process().children())
    without_model(refuse="if config.tensor_parallel_rank: raise ModelError('--device cuda:1: cannot be used')")
    group = WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=3))
    with pytest.raises(ExecutorError) as caught:
        await group.start()
    assert str(caught.value) == "--device cuda:1: cannot be used"
    assert set(psutil.Process().children()) == others
    assert not group._directory.exists()


async def test_a_start_that_is_cancelled_leaves_no_process(without_model):
    others = set(psutil.Process().children())
    without_model()
    for num_turns in (0, 1, 2, 5):
        starting = asyncio.ensure_future(WorkerGroup(WorkerConfig(model="none", tensor_parallel_size=2)).start())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert set(psutil.Process().children()) == others
