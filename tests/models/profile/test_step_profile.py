"""The least time of a step's stages, what a machine does at best, and the steps that are measured."""

import pytest

from penstock.kernels.cpu.bindings import StorageFormat, find_kernels
from penstock.kernels.cpu.program import STAGES, DecoderLayer, Library
from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu import machine_limits
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.backends.cpu.machine_limits import measure_limits
from penstock.models.backends.cpu.stage_limits import ComputedSpan, MachineLimits, StageLimits
from penstock.models.executor.step_profile import ProfiledLoad
from penstock.models.worker.step_profile import PYTHON, _chunks, profile_model

UNIT = MachineLimits(1.0, {"float32": 1.0, "bfloat16": 1.0, "int8": 1.0})
"""A machine on which a limit in seconds is a number of bytes or operations."""
SPANS = [ComputedSpan(0, 40), ComputedSpan(70, 71)]


def brute_force_pairs(spans, window, chunked):
    def sees(position, key):
        return not window or (key // window == position // window if chunked else key > position - window)

    return sum(sees(position, key) for span in spans for position in range(*span) for key in range(position + 1))


@pytest.mark.parametrize("variant", ["llama", "mistral-window9", "qwen3-moe", "llama4"])
def test_limits_are_the_bytes_and_operations_of_the_model(cpu_library, tiny_model, worker_config, variant):
    backend = load_backend(worker_config(tiny_model(variant).path, backend="cpu"))
    assert isinstance(backend, CpuBackend)
    model = backend.model.model
    layers = (DecoderLayer * model.num_layers).from_address(model.layers)
    module = tiny_model(variant).module.config
    found = StageLimits(model, UNIT).of_step(SPANS, 2)
    assert found.keys() <= set(STAGES)
    tokens, heads, kv_heads = 41, module.num_attention_heads, module.num_key_value_heads
    hidden, head_dim, num = module.hidden_size, layers[0].kv.head_dim, model.num_layers
    assert found["qkv"].arithmetic == 2 * tokens * num * hidden * head_dim * (heads + 2 * kv_heads)
    # In the last layer only the tokens whose logits are wanted go on.
    assert found["output"].arithmetic == 2 * ((num - 1) * tokens + 2) * hidden * head_dim * heads
    assert found["head"].arithmetic == 2 * 2 * hidden * module.vocab_size
    pairs = sum(brute_force_pairs(SPANS, layer.window, model.chunked_windows) for layer in layers)
    assert found["attention"].arithmetic == 4 * pairs * heads * head_dim
    kinds = ("qkv", "output", "gate and up", "down", "experts", "head")
    read = sum(found[name].memory for name in kinds if name in found)
    # All weights except the embedding, norms and, here, experts that no token chooses.
    assert 0.3 * backend.facts.weight_bytes < read <= backend.facts.weight_bytes
    assert found["attention"].memory > 0


def test_products_of_recurrent_layers_count(cpu_library, build_model, tmp_path, worker_config):
    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
    tiny = build_model(tmp_path, "Lfm2Config", layers)
    backend = load_backend(worker_config(tiny.path, backend="cpu"))
    assert isinstance(backend, CpuBackend)
    found = StageLimits(backend.model.model, UNIT).of_step(SPANS, 2)
    tokens, kept, shape = 41, 2, tiny.module.config
    heads, kv_heads, hidden = shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size
    head_dim = hidden // heads
    assert found["qkv"].arithmetic == 2 * tokens * hidden * (2 * 3 * hidden + head_dim * (heads + 2 * kv_heads))
    # A convolution, attention, and a convolution of which only the tokens whose logits are wanted go on.
    assert found["output"].arithmetic == 2 * hidden * (tokens * (hidden + head_dim * heads) + kept * hidden)


def test_no_logits_need_no_head(cpu_library, tiny_model, worker_config):
    backend = load_backend(worker_config(tiny_model("llama").path, backend="cpu"))
    assert isinstance(backend, CpuBackend)
    assert StageLimits(backend.model.model, UNIT).of_step([ComputedSpan(0, 9)], 0)["head"] == (0, 0)


def test_a_machine_is_measured(cpu_library, monkeypatch):
    monkeypatch.setattr(machine_limits, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(machine_limits, "SECONDS", 0.01)
    kernels = find_kernels()
    assert kernels is not None
    found = measure_limits(Library(2), kernels, [StorageFormat.INT4])
    assert found.bytes_per_s > 0
    assert found.operations_per_s.keys() == {"bfloat16", "int8"}
    assert min(found.operations_per_s.values()) > 0


def test_prompts_fill_the_steps_that_compute_them():
    steps = [[tuple(chunk) for chunk in map(chunk_fields, step)] for step in _chunks(ProfiledLoad(3, 10, 2), 16)]
    assert steps == [[(0, 0, 10), (1, 0, 6)], [(1, 6, 10), (2, 0, 10)]]
    assert len(list(_chunks(ProfiledLoad(3, 10, 2), 30))) == 1


def chunk_fields(chunk):
    return chunk.row, chunk.start, chunk.end


def test_stages_add_up_to_the_steps(cpu_library, tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, backend="cpu", num_threads=2, max_model_len=64)
    profile = profile_model(config, ProfiledLoad(rows=3, prompt_tokens=20, output_tokens=5, rounds=2), machine=UNIT)
    decode, prefill = profile.steps
    assert (decode.kind, decode.tokens, prefill.kind, prefill.tokens) == ("decode", 3, "prefill", 60)
    for step in profile.steps:
        assert sum(stage.seconds for stage in step.stages) == pytest.approx(step.seconds)
        assert sum(stage.share for stage in step.stages) == pytest.approx(1)
        assert {stage.name for stage in step.stages} <= {*STAGES, PYTHON}
        limited = {stage.name for stage in step.stages if stage.limited_by}
        assert limited == {"qkv", "attention", "output", "gate and up", "down", "head"}


def test_recurrent_layers_have_states(cpu_library, build_model, tmp_path, worker_config):
    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
    config = worker_config(build_model(tmp_path, "Lfm2Config", layers).path, backend="cpu", max_model_len=64)
    profile = profile_model(config, ProfiledLoad(rows=3, prompt_tokens=20, output_tokens=5, rounds=1), machine=UNIT)
    assert [(step.kind, step.tokens) for step in profile.steps] == [("decode", 3), ("prefill", 60)]
