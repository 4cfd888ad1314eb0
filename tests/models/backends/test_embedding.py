"""Vectors of pooled rows: those of transformers, and the same however rows are batched, cut, cached and preempted."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu import model as cpu_model
from penstock.models.batch.pooled_row import PooledRow
from penstock.models.checkpoint.checkpoint import resolve_model
from penstock.models.checkpoint.pooling_config import PoolingConfig, read_embedding
from penstock.models.errors import ModelError
from penstock.models.executor.wire import FrameBuffer, FrameKind, encode_frame
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, Pooling, RowResult, SamplingParams, StepPlan, StepResult

pytestmark = pytest.mark.usefixtures("cpu_library")

BACKENDS = ["reference", "cpu"]
VARIANTS = ["llama", "qwen3"]
NUM_TOKENS = 6


async def embedded(engine, prompts, pooling):
    vectors = engine.submit_pooled(prompts, pooling)
    await engine.engine.wait_idle()
    return vectors.arrays()


def oracle(module, prompts, pooling):
    """By transformers, and torch's own mean."""
    vectors = []
    with torch.inference_mode():
        for prompt in prompts:
            hidden = module(torch.tensor([prompt])).last_hidden_state[0]
            pooled = {Pooling.LAST: hidden[-1], Pooling.CLS: hidden[0], Pooling.MEAN: hidden.mean(0)}[pooling]
            vectors.append(pooled.float().numpy())
    return vectors


def check(vectors, wanted):
    for vector, other in zip(vectors, wanted, strict=True):
        np.testing.assert_allclose(vector, other, rtol=0, atol=1e-4)


@pytest.fixture
def make(in_process, monkeypatch):
    """An executor in this process, that uses all its threads in the smallest of steps."""
    monkeypatch.setattr(cpu_model, "SMALL_STEP", 0)
    return in_process


@pytest.mark.parametrize("pooling", list(Pooling), ids=lambda pooling: pooling.value)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
class TestEqualToTransformers:
    async def test_alone_and_with_generation_in_the_same_steps(
        self, tiny_model, make, start_engine, prompts, variant, backend, pooling
    ):
        """In chunks, beside rows that decode, with the cache and without, and when blocks are short."""
        model = tiny_model(variant)
        wanted = oracle(model.module.model, prompts, pooling)
        executor = make(model.path, num_blocks=24, backend=backend, num_threads=2, max_model_len=128)
        engine = await start_engine(executor, max_num_batched_tokens=23, max_num_seqs=12)
        sampling = SamplingParams(temperature=0.0)
        [alone] = await engine.run([prompts[3]], sampling, NUM_TOKENS)
        check(await embedded(engine, prompts, pooling), wanted)
        for _ in range(2):  # the second time, most of it is cached
            texts = [engine.submit(prompts[3], sampling, NUM_TOKENS) for _ in range(4)]
            check(await embedded(engine, prompts, pooling), wanted)
            assert [text.token_ids for text in texts] == [alone.token_ids] * 4
        plans = executor.plans
        pooled = {added.row for plan in plans for added in plan.added if added.pooling is not None}
        assert any(plan.decodes and pooled & {chunk.row for chunk in plan.chunks} for plan in plans), "never beside"
        assert engine.stats.running == engine.stats.waiting == engine.stats.kv_usage == 0


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_vector_of_the_whole_context(tiny_model, make, start_engine, backend):
    """Nothing is left for an output, and nothing is needed."""
    model = tiny_model("qwen3")
    prompt = [(7 * i) % 151 for i in range(64)]
    engine = await start_engine(make(model.path, num_blocks=4, backend=backend, max_model_len=64))
    for pooling in Pooling:
        check(await embedded(engine, [prompt], pooling), oracle(model.module.model, [prompt], pooling))


@pytest.mark.parametrize("pooling", list(Pooling), ids=lambda pooling: pooling.value)
@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
async def test_bits_on_the_cpu_depend_only_on_the_prompt(tiny_model, make, start_engine, prompts, pooling, config):
    model = tiny_model("qwen3")
    new = partial(make, model.path, backend="cpu", max_model_len=128, max_num_batched_tokens=512, **config)
    engine = await start_engine(new(), enable_prefix_caching=False)
    alone = [(await embedded(engine, [prompt], pooling))[0].tobytes() for prompt in prompts]
    assert len(set(alone)) >= len(alone) - (pooling is Pooling.CLS)  # two begin alike
    for num_tokens, num_threads, cached in ((512, 2, False), (64, 1, False), (7, 3, False), (23, 2, True)):
        engine = await start_engine(
            new(num_threads=num_threads),
            enable_prefix_caching=cached,
            max_num_batched_tokens=num_tokens,
            max_num_seqs=7,
        )
        for _ in range(1 + cached):
            generating = [engine.submit(prompt, SamplingParams(), NUM_TOKENS) for prompt in prompts[:3]]
            assert [vector.tobytes() for vector in await embedded(engine, prompts, pooling)] == alone
            assert all(len(answer.token_ids) == NUM_TOKENS for answer in generating)


@pytest.fixture(scope="module")
def demo():
    """The built-in model's directory, transformers' own instance of it, and prompts of real text."""
    path = resolve_model("demo")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = ("The kernel is", "A package is a file that", "Once upon a time there was a small machine. " * 8)
    module = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return path, module, [tokenizer.encode(text).ids for text in texts]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", list(Pooling), ids=lambda pooling: pooling.value)
async def test_the_demo_model_equals_transformers(demo, make, start_engine, backend, pooling):
    path, module, prompts = demo
    engine = await start_engine(make(path, backend=backend, max_model_len=256), max_num_batched_tokens=48)
    check(await embedded(engine, prompts, pooling), oracle(module, prompts, pooling))


class TestBaseModels:
    """Checkpoints that were saved without a head, as those of embedding models are."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("variant", VARIANTS)
    async def test_are_embedded(self, tiny_model, make, start_engine, tmp_path, prompts, variant, backend):
        base = tiny_model(variant).module.model
        base.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(base).__name__]
        engine = await start_engine(make(tmp_path, backend=backend, max_model_len=128))
        check(await embedded(engine, prompts, Pooling.MEAN), oracle(base, prompts, Pooling.MEAN))


def test_the_head_is_not_multiplied_for_pooled_rows(tiny_model, worker_config):
    """A step without a row to sample spends no time there."""
    backend: Any = load_backend(worker_config(tiny_model("qwen3").path, num_blocks=4, backend="cpu", max_model_len=64))
    runner = Runner(backend)
    added = AddedRow(0, 1, [1, 2, 3], 3, 0, [0], SamplingParams(), Pooling.MEAN)
    result = runner.run(StepPlan(0, [], [added], [], [Chunk(0, 0, 3)], []))
    assert len(result.rows[0].vector or b"") == 4 * backend.facts.hidden_size
    seconds = backend.seconds()
    assert seconds["head"] == seconds["sample"] == 0
    assert seconds["down"] > 0


def test_plans_and_results_with_vectors_cross_the_wire():
    plan = StepPlan(3, [], [AddedRow(0, 1, [1], 1, 0, [0], SamplingParams(), Pooling.CLS)], [], [], [Decode(1, 1)])
    result = StepResult(3, [RowResult(0, 1, 1, [], vector=b"\x00\xff" * 8), RowResult(1, 1, 4, [9])], [], 0, 1)
    frames = encode_frame(FrameKind.PLAN, plan) + encode_frame(FrameKind.RESULT, result)
    assert [body for _, body in FrameBuffer().feed(frames)] == [plan, result]


def test_a_sum_is_taken_position_by_position():
    """In float32, where the order of a sum shows."""
    states = np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32) * 1e3
    one, other = (PooledRow(Pooling.MEAN, 50, 8) for _ in range(2))
    one.add_states(states)
    for begin, end in ((0, 1), (1, 17), (17, 50)):
        assert list(other.counted(begin, end)) == list(range(begin, end))
        other.add_states(states[begin:end])
    assert one.vector() == other.vector()
    np.testing.assert_allclose(np.frombuffer(one.vector(), np.float32), states.mean(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("pooling", "counted"), [(Pooling.LAST, range(9, 10)), (Pooling.CLS, range(1)), (Pooling.MEAN, range(10))]
)
def test_positions(pooling, counted):
    assert pooling.positions(10) == counted
    row = PooledRow(pooling, 10, 4)
    found = [position for begin in (0, 4, 8) for position in row.counted(begin, min(10, begin + 4))]
    assert found == list(counted)


# ---------------------------------------------------------------------------------------------------------------- files


def write(path: Path, pooling=None, modules=None, folder="1_Pooling") -> Path:
    if pooling is not None:
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        listed = [{"idx": i, "name": str(i), "path": at, "type": kind} for i, (at, kind) in enumerate(modules)]
        (path / "modules.json").write_text(json.dumps(listed))
    return path


ST = "sentence_transformers.models."
MODULES = [("", f"{ST}Transformer"), ("1_Pooling", f"{ST}Pooling")]
OFF = {"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, "pooling_mode_cls_token": False}


class TestReadEmbedding:
    @pytest.mark.parametrize(
        ("config", "pooling"),
        [
            (OFF | {"pooling_mode_lasttoken": True, "include_prompt": True}, Pooling.LAST),
            (OFF | {"pooling_mode_mean_tokens": True}, Pooling.MEAN),
            (OFF | {"pooling_mode_cls_token": True}, Pooling.CLS),
            ({"pooling_mode": "lasttoken"}, Pooling.LAST),
            ({"pooling_mode": "mean"}, Pooling.MEAN),
        ],
    )
    def test_the_models_own_file(self, tmp_path, config, pooling):
        assert read_embedding(write(tmp_path, config)) == PoolingConfig(pooling, normalize=True)

    def test_without_files_it_is_the_last_token_with_length_1(self, tmp_path):
        assert read_embedding(tmp_path) == PoolingConfig(Pooling.LAST, normalize=True)

    def test_the_module_list_locates_pooling_and_decides_normalization(self, tmp_path):
        modules = [("", f"{ST}Transformer"), ("pool", "some.new.place.Pooling")]
        path = write(tmp_path, OFF | {"pooling_mode_mean_tokens": True}, modules, "pool")
        assert read_embedding(path) == PoolingConfig(Pooling.MEAN, normalize=False)
        write(path, modules=[*modules, ("2_Normalize", f"{ST}Normalize")])
        assert read_embedding(path) == PoolingConfig(Pooling.MEAN, normalize=True)

    def test_the_operator_goes_first(self, tmp_path):
        path = write(tmp_path, {"pooling_mode": "max"}, [*MODULES, ("2_Dense", f"{ST}Dense")])
        assert read_embedding(path, Pooling.CLS) == PoolingConfig(Pooling.CLS, normalize=False)

    @pytest.mark.parametrize(
        ("config", "modules", "problem"),
        [
            (OFF, None, "no pooling mode"),
            (OFF | {"pooling_mode_max_tokens": True}, None, "pooling_mode_max_tokens"),
            (OFF | {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None, " and "),
            ({"pooling_mode": "weightedmean"}, None, "weightedmean"),
            ([], None, "not a JSON object"),
            (None, [*MODULES, ("2_Dense", f"{ST}Dense")], "Dense"),
            (None, [("", f"{ST}Transformer"), ("../elsewhere", f"{ST}Pooling")], "elsewhere"),
        ],
    )
    def test_what_cannot_be_done_is_refused_with_the_remedy(self, tmp_path, config, modules, problem):
        with pytest.raises(ModelError, match="--pooling") as refusal:
            read_embedding(write(tmp_path, config, modules))
        assert problem in str(refusal.value)
        assert str(tmp_path) in str(refusal.value)

    @pytest.mark.parametrize("text", ["{", "7", '[{"type": "Pooling"}]'])
    def test_a_broken_list_of_modules(self, tmp_path, text):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ModelError, match=r"modules\.json"):
            read_embedding(tmp_path)
