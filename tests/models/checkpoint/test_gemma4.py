"""Gemma 4's configs, as published and as transformers writes them. test_oracle compares outputs with transformers'."""

import numpy as np
import pytest

from penstock.models.architecture.registry import spec_from_config
from penstock.models.architecture.rope import inverse_frequencies
from penstock.models.errors import ModelError

# Language models, without towers.
GEMMA4_E2B = {
    "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": False, "enable_moe_block": False,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072, "num_attention_heads": 8, "num_global_key_value_heads": None,
    "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512, "tie_word_embeddings": True, "use_double_wide_mlp": True, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_E4B = {
    **GEMMA4_E2B, "hidden_size": 2560, "intermediate_size": 10240,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7, "num_hidden_layers": 42,
    "num_key_value_heads": 2, "num_kv_shared_layers": 18, "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA4_31B = {
    **GEMMA4_E4B, "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
}  # fmt: skip
GEMMA4_26B_A4B = {
    **GEMMA4_31B, "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "top_k_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GEMMA4_E2B, 4_628_569_379),
        (GEMMA4_E4B, 7_463_013_418),
        (GEMMA4_31B, 30_697_345_340),
        (GEMMA4_26B_A4B, 25_233_141_790),
    ],
)
def test_published_configs_have_their_published_sizes(config, num_parameters):
    assert spec_from_config(config).num_parameters == num_parameters


def test_layers_of_gemma4_that_differ():
    small = spec_from_config(GEMMA4_E2B)
    assert small.kv_sources == (*range(15), *([13] * 4 + [14]) * 4)
    assert [small.at(layer).head_dim for layer in (13, 14, 15, 19)] == [256, 512, 256, 512]
    assert [small.at(layer).intermediate_size for layer in (0, 14, 15, 34)] == [6144, 6144, 12288, 12288]
    assert small.kv_bytes_per_token(2) == 2 * 2 * (12 * 256 + 3 * 512)
    assert small.qkv_rows(19) == {"q_proj": 8 * 512}
    large = spec_from_config(GEMMA4_31B)
    assert large.qkv_rows(5) == {"q_proj": 32 * 512, "k_proj": 4 * 512}
    assert large.qkv_rows(4) == {"q_proj": 32 * 256, "k_proj": 16 * 256, "v_proj": 16 * 256}
    frequencies = inverse_frequencies(large.ropes[5], 512)
    assert np.count_nonzero(frequencies) == 64
    assert frequencies[63] == pytest.approx(1e6 ** (-126 / 512))
    bare = {"architectures": ["Gemma4UnifiedForCausalLM"], "hidden_size": 64, "intermediate_size": 96}
    unified = spec_from_config({**bare, "num_hidden_layers": 7})
    assert (unified.layer_inputs, unified.windows) == (None, (*[1024] * 5, None, None))
    assert unified.max_positions == 262144


def test_sizes_of_layers_as_transformers_writes_them():
    written = {**GEMMA4_31B, "per_layer_config": {
        f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)
    }}  # fmt: skip
    for name in ("global_head_dim", "num_global_key_value_heads"):
        del written[name]
    assert spec_from_config(written) == spec_from_config(GEMMA4_31B)
    for entry in ({"5": {"head_dim": 512}}, {"4": {"head_dim": 512}}):
        with pytest.raises(ModelError, match=r"per_layer_config is .*: it must be the same for all layers without"):
            spec_from_config({**written, "per_layer_config": entry})


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (GEMMA4_E2B, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4_E2B, {"num_kv_shared_layers": 31}, "num_kv_shared_layers"),
        (GEMMA4_E2B, {"num_kv_shared_layers": 35}, "num_kv_shared_layers"),
        (GEMMA4_E2B, {"vocab_size_per_layer_input": 262143}, "vocab_size_per_layer_input"),
        (GEMMA4_E2B, {"global_head_dim": 511}, "global_head_dim"),
        (GEMMA4_E2B, {"layer_types": ["sliding_attention"] * 35}, "layer_types"),
        (GEMMA4_31B, {"num_global_key_value_heads": 5}, "num_global_key_value_heads"),
        (GEMMA4_26B_A4B, {"top_k_experts": 129}, "top_k_experts"),
    ],
)
def test_what_is_refused_names_the_field(config, changes, named):
    with pytest.raises(ModelError, match=rf"config\.json: {named} is .*: it "):
        spec_from_config({**config, **changes})
