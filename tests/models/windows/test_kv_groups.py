"""How the layers of models are divided into groups, and what that saves."""

from collections import Counter

import pytest
import transformers

from penstock.models.architecture.registry import spec_from_config
from penstock.models.backends.kv_groups import divide_layers
from penstock.scheduler.worker_config import WorkerConfig

WINDOWED = WorkerConfig(model="", frees_windows=True)
GEMMA3 = {"sliding_window": 1024, "max_position_embeddings": 131072, "vocab_size": 262208}
MODELS = {
    "gpt-oss-20b": ("GptOssConfig", {"num_hidden_layers": 24}, "GptOssForCausalLM"),
    "gemma-3-12b": (
        "Gemma3TextConfig",
        {**GEMMA3, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8},
        "Gemma3ForCausalLM",
    ),
    "gemma-3-27b": (
        "Gemma3TextConfig",
        {**GEMMA3, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128},
        "Gemma3ForCausalLM",
    ),
    "gemma-3-1b": (
        "Gemma3TextConfig",
        {"sliding_window": 512, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_key_value_heads": 1},
        "Gemma3ForCausalLM",
    ),
    "mistral-7b-v0.1": ("MistralConfig", {"sliding_window": 4096}, "MistralForCausalLM"),
}


def spec_of(name, **changes):
    config_class, fields, architecture = MODELS[name]
    config = getattr(transformers, config_class)(**fields | changes)
    return spec_from_config({**config.to_dict(), "architectures": [architecture]})


def gib(spec, groups, config, num_tokens):
    """The memory of a sequence."""
    num_blocks = groups.in_blocks(config).num_blocks_for(num_tokens)
    return num_blocks * config.block_size * groups.bytes_per_token(spec, 2) / (1 << 30)


@pytest.mark.parametrize(
    ("name", "sizes", "one", "divided"),
    [
        ("gpt-oss-20b", [12, 12], 6.0, 3.1),
        ("gemma-3-12b", [8] * 6, 48.0, 8.9),
        ("gemma-3-27b", [11, 11, 10, 10, 10, 10], 62.0, 12.3),
    ],
)
def test_the_figures_of_the_documentation(name, sizes, one, divided):
    spec = spec_of(name)
    groups = divide_layers(WINDOWED, spec)
    assert list(Counter(sorted(groups.of_layers)).values()) == sizes
    whole = divide_layers(WorkerConfig(model=""), spec)
    assert whole.num_windowed == 0
    assert round(gib(spec, whole, WINDOWED, 131072), 1) == one
    assert round(gib(spec, groups, WINDOWED, 131072), 1) == divided
    empty = len(sizes) * groups.num_places / spec.num_layers
    assert gib(spec, groups, WINDOWED, 1024) == pytest.approx(empty * gib(spec, whole, WINDOWED, 1024))
    assert empty < 1.07


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-12b", "gemma-3-27b", "gemma-3-1b"])
def test_each_layer_has_a_place_and_those_of_group_0_have_no_window_but_a_few(name):
    spec = spec_of(name)
    groups = divide_layers(WINDOWED, spec)
    assert groups.window == max(window for window in spec.windows if window)
    assert len(set(zip(groups.of_layers, groups.places, strict=True))) == spec.num_layers
    of_group_0 = [window for window, group in zip(spec.windows, groups.of_layers, strict=True) if not group]
    assert set(spec.windows) - set(of_group_0) <= {groups.window}
    assert of_group_0.count(None) == spec.windows.count(None)
    assert len(of_group_0) <= 1.25 * of_group_0.count(None)


@pytest.mark.parametrize(
    ("name", "changes", "config"),
    [
        ("mistral-7b-v0.1", {}, {}),
        ("gpt-oss-20b", {}, {"frees_windows": False}),
        ("gpt-oss-20b", {}, {"block_bytes_beside": 1}),
        ("gpt-oss-20b", {}, {"max_model_len": 2048}),  # one step may have all of it
        ("gemma-3-12b", {}, {"max_model_len": 1024, "max_num_batched_tokens": 64}),
        ("gemma-3-12b", {"sliding_window": 131072}, {}),
        ("gemma-3-12b", {"layer_types": ["full_attention"] * 30 + ["sliding_attention"] * 18}, {}),
    ],
)
def test_models_with_one_group(name, changes, config):
    config = {"model": "", "frees_windows": True} | config
    groups = divide_layers(WorkerConfig(**config), spec_of(name, **changes))
    assert groups.num_windowed == 0
    assert groups.num_places == len(groups.of_layers)


def test_a_worker_that_replaces_another_has_the_same_groups():
    """Its context may be as short as the memory of the first one made it."""
    config = WorkerConfig(model="", frees_windows=True, num_blocks=300, max_model_len=2048)
    assert divide_layers(config, spec_of("gpt-oss-20b")).num_windowed == 1
