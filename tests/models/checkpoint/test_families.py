"""What the configs of families say, what is refused, and checkpoints that lay tensors out in their own ways. That the
families compute what transformers does is test_oracle's."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.models.architecture.registry import ignored_layer_types, spec_from_config
from penstock.models.architecture.rope import attention_factor, inverse_frequencies
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import ClampedGate, DefaultRope, LinearRope, LongRope, Rope, YarnRope
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.weights import DenseLinear, RmsNorm
from penstock.models.checkpoint.checkpoint import SINGLE, check_checkpoint
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.errors import ModelError

# As published: the fields of these models' config.json that matter here.
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000, "tie_word_embeddings": False,
    "vocab_size": 100352,
}  # fmt: skip
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}, "rope_theta": 10000.0,
    "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (GEMMA2_2B, 2_614_341_888),
        (GEMMA3_1B, 999_885_952),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL_8X7B, 46_702_792_704),
        (OLMO2_7B, 7_298_617_344),
        (PHI4_MINI, 3_836_021_760),
        (GPT_OSS_20B, 20_914_757_184),
    ],
)
def test_published_configs_have_their_published_sizes(config, num_parameters):
    assert spec_from_config(config).num_parameters == num_parameters


def test_details_of_published_configs():
    gemma2 = spec_from_config({**GEMMA2_2B, "query_pre_attn_scalar": 144})
    assert gemma2.windows[:3] == (4096, None, 4096)
    assert (gemma2.attention_scale, gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (1 / 12, 50.0, 30.0)
    assert (gemma2.embedding_scale, gemma2.norm_offset, gemma2.tied_embeddings) == (48.0, 1.0, True)
    gemma3 = spec_from_config(GEMMA3_1B)
    assert gemma3.windows[4:7] == (512, None, 512)
    assert gemma3.ropes[4:7] == (DefaultRope(10_000.0), DefaultRope(1e6), DefaultRope(10_000.0))
    scaled = spec_from_config({**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.ropes[4:6] == (DefaultRope(10_000.0), LinearRope(1e6, 8.0))
    assert scaled.max_positions == 32768
    phi4 = spec_from_config(PHI4_MINI)
    assert (phi4.rotary_dim, phi4.head_dim, phi4.max_positions) == (96, 128, 4096)
    assert phi4.ropes[0] == LongRope(10_000.0, (1.0,) * 48, math.sqrt(1 + math.log(32) / math.log(4096)))
    gpt_oss = spec_from_config(GPT_OSS_20B)
    assert gpt_oss.experts is not None
    assert gpt_oss.experts.gate == ClampedGate(1.702, 7.0)
    assert (gpt_oss.sinks, gpt_oss.windows[:2], gpt_oss.max_positions) == (True, (128, None), 131072)
    bare = {name: value for name, value in GPT_OSS_20B.items() if not name.startswith(("rope", "layer"))}
    assert spec_from_config(bare) == gpt_oss


LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"], "vocab_size": 160, "hidden_size": 64, "intermediate_size": 40,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "windows", "layers"),
    [
        ({}, (8192, 8192, 8192, None), (1, 1, 1, 1)),
        ({"no_rope_layers": []}, (8192, 8192, 8192, None), (1, 1, 1, 1)),  # as published
        ({"no_rope_layers": [0, 1, 1, 0]}, (None, 8192, 8192, None), (1, 1, 1, 1)),
        ({"attention_chunk_size": None, "moe_layers": [], "num_local_experts": 0}, (None,) * 4, None),
        ({"interleave_moe_layer_step": 2, "attention_chunk_size": 9}, (9, 9, 9, None), (0, 1, 0, 1)),
        (
            {"moe_layers": [0], "layer_types": ["full_attention", *["chunked_attention"] * 3]},
            (None, 8192, 8192, 8192),
            (1, 0, 0, 0),
        ),
    ],
)
def test_layers_of_llama4(changes, windows, layers):
    config = {**LLAMA4, **changes}
    spec = spec_from_config(config)
    assert spec.windows == windows
    assert (None if spec.experts is None else spec.experts.layers) == layers
    # Of the MLP, in layers without experts.
    assert spec.intermediate_size == (40 if layers == (1, 1, 1, 1) else 16384)
    assert ignored_layer_types(config, spec) is None
    rotated = changes.get("no_rope_layers") or [1, 1, 1, 0]
    assert [spec.norms_qk(layer) for layer in range(4)] == [turns == 1 for turns in rotated]
    assert [spec.scales_queries(layer) for layer in range(4)] == [turns == 0 for turns in rotated]


@pytest.mark.parametrize(("value", "is_scaled"), [(4, True), (True, True), (0, False), (False, False)])
def test_the_scaling_of_llama4s_queries_may_be_a_number(value, is_scaled):
    spec = spec_from_config({**LLAMA4, "attn_temperature_tuning": value})
    assert (spec.query_scaling is not None) == is_scaled


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, (1, 1, 1, 1)), ({"decoder_sparse_step": 2}, (0, 1, 0, 1)), ({"mlp_only_layers": [0, 3]}, (0, 1, 1, 0))],
)
def test_layers_of_qwen3_moe_that_have_experts(changes, layers):
    spec = spec_from_config({**QWEN3_30B_A3B, "num_hidden_layers": 4, **changes})
    assert spec.experts is not None
    assert spec.experts.layers == layers
    renamed = {**QWEN3_30B_A3B, "num_hidden_layers": 4, **changes, "num_local_experts": 128}  # transformers 5
    assert spec_from_config({name: value for name, value in renamed.items() if name != "num_experts"}) == spec


SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "alpha": 50.0}


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (GEMMA2_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2_2B, {"sliding_window": None}, "layer_types"),
        (GEMMA2_2B, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA2_2B, {"hidden_activation": "relu"}, "hidden_activation"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3_1B, {"rope_local_base_freq": 0}, "rope_local_base_freq"),
        (GEMMA3_1B, {"rope_parameters": {"full_attention": {"rope_type": "xpos"}}}, "full_attention.rope_type"),
        (QWEN3_30B_A3B, {"num_experts": 0}, "num_experts"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (MIXTRAL_8X7B, {"num_local_experts": "8"}, "num_local_experts"),
        (OLMO2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 0.001}, "partial_rotary_factor"),
        (PHI4_MINI, {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 47}}, "rope_scaling.short_factor"),
        (PHI4_MINI, {"rope_scaling": {"type": "llama3"}}, "rope_scaling.type"),
        (GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        (GPT_OSS_20B, {"swiglu_limit": -1.0}, "swiglu_limit"),
        (SIZES, {"architectures": ["CwmForCausalLM"], "sliding_window": None}, "layer_types"),
        (SIZES, {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": ""}, "sliding_window_pattern"),
        (SIZES, {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        (SIZES, {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 0}, "attention_chunk_size"),
        (SIZES, {"architectures": ["Llama4ForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        (SIZES, {"architectures": ["Llama4ForCausalLM"], "attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        (SIZES, {"architectures": ["MllamaForCausalLM"], "cross_attention_layers": [1, 0]}, "cross_attention_layers"),
        (SIZES, {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 2, "rope_scaling": ALPHA}, "alpha"),
        (SIZES, {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": [2, 1]}, "moe_topk"),
        (SIZES, {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": []}, "moe_topk"),
        (SIZES, {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": [4, 4]}, "num_experts"),
        (SIZES, {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 5}, "moe_topk"),
        (SIZES, {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 8}, "n_group"),
        (SIZES, {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_group": 3}, "n_group"),
        (SIZES, {"architectures": ["SolarOpenForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (SIZES, {"architectures": ["Glm4MoeForCausalLM"], "n_group": 64, "num_experts_per_tok": 3}, "topk_group"),
    ],
)
def test_what_is_refused_names_the_field(config, changes, named):
    with pytest.raises(ModelError, match=rf"config\.json: (rope_(parameters|scaling)\.)?{named} is .*: it "):
        spec_from_config({**config, **changes})


ROPES = {
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "llama3 without a blend": {  # Llama 4 Scout's
        "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("theta", [1e4, 1.5e5, 5e5, 1e6, 5e6])
def test_frequencies_are_those_of_transformers(theta):
    """Nearly all to the last bit. In that bit torch's own float32 powers depend on the CPU's instruction set, about one
    time in a hundred; a wrong order of operations shows in more than a bit."""
    wrong, total = 0, 0
    for head_dim in (24, 64, 80, 96, 128, 256):
        config = transformers.LlamaConfig(
            hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072
        )
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        pairs: list[tuple[Rope, torch.Tensor, float]] = [(DefaultRope(theta), 1.0 / theta**exponents, 1.0)]
        for kind, values in ROPES.items():
            name = kind.split()[0]
            config.rope_parameters = {"rope_type": name, "rope_theta": theta, **values}
            rope = spec_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).ropes[0]
            pairs.append((rope, *ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))))
        for rope, expected, scale in pairs:
            got = inverse_frequencies(rope, head_dim)
            assert got.dtype == np.float32
            steps = np.abs(got.view(np.int32) - expected.numpy().view(np.int32))
            assert steps.max() <= 2, rope
            wrong, total = wrong + int(np.count_nonzero(steps)), total + steps.size
            assert attention_factor(rope) == scale
    assert wrong <= 0.05 * total


def test_frequencies_of_longrope_are_those_of_transformers():
    factors = [1.0 + pair / 10 for pair in range(48)]
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [9.0] * 48}
    config = transformers.Phi3Config(
        hidden_size=3072, num_attention_heads=24, max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_parameters={**parameters, "partial_rotary_factor": 0.75},
    )  # fmt: skip
    spec = spec_from_config({**config.to_dict(), "architectures": ["Phi3ForCausalLM"]})
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    np.testing.assert_allclose(inverse_frequencies(spec.ropes[0], spec.rotary_dim), expected.numpy(), rtol=2e-7)
    assert attention_factor(spec.ropes[0]) == pytest.approx(scale)


def test_only_yarn_has_an_attention_factor_other_than_one():
    assert attention_factor(DefaultRope(1e4)) == 1.0
    assert attention_factor(YarnRope(1e4, 4.0, 32, 32.0, 1.0, 1.25, True)) == 1.25


def tensors_of(path):
    """Everything in a checkpoint under the model's own names."""
    info = check_checkpoint(path)
    files = TensorFiles(entry.file for entry in info.tensors.values())
    return {name: files.array(entry).copy() for name, entry in info.tensors.items()}


@pytest.mark.parametrize("variant", ["mixtral", "qwen3-moe", "dots1", "minimax-m2", "hunyuan-moe"])
def test_experts_saved_as_one_tensor_are_the_same(tiny_model, tmp_path, variant):
    model = tiny_model(variant)
    model.module.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / SINGLE)
    assert "model.layers.2.mlp.experts.gate_up_proj" in names
    fused, split = tensors_of(tmp_path), tensors_of(model.path)
    assert fused.keys() == split.keys()
    assert all(np.array_equal(fused[name], split[name]) for name in split)


def test_every_part_of_a_tensor_is_found_where_it_is(tiny_model):
    """Against slices of what transformers holds."""
    phi = tiny_model("phi3-partial-rotary")
    got, spec = tensors_of(phi.path), check_checkpoint(phi.path).spec
    layer = phi.module.model.layers[1]
    query, key, value = layer.self_attn.qkv_proj.weight.split([spec.query_size, spec.kv_size, spec.kv_size])
    gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
    parts = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}
    for name, expected in {**parts, "mlp.gate_proj": gate, "mlp.up_proj": up}.items():
        assert np.array_equal(got[f"model.layers.1.{name}.weight"], expected.detach().numpy())

    oss = tiny_model("gpt-oss")
    got, experts = tensors_of(oss.path), oss.module.model.layers[2].mlp.experts
    for expert in (0, 4):
        prefix = f"model.layers.2.mlp.experts.{expert}."
        for half, name in enumerate(("gate_proj", "up_proj")):
            expected = experts.gate_up_proj[expert, :, half::2].T
            assert np.array_equal(got[f"{prefix}{name}.weight"], expected.detach().numpy())
            bias = experts.gate_up_proj_bias[expert, half::2]
            assert np.array_equal(got[f"{prefix}{name}.bias"], bias.detach().numpy())
        assert np.array_equal(got[f"{prefix}down_proj.weight"], experts.down_proj[expert].T.detach().numpy())
        assert np.array_equal(got[f"{prefix}down_proj.bias"], experts.down_proj_bias[expert].detach().numpy())


def edited(source, target, edit):
    """A copy of a checkpoint whose tensors ``edit`` changed."""
    path = shutil.copytree(source, target)
    tensors = load_file(path / SINGLE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / SINGLE)
    return path


QKV = "model.layers.0.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.update({f"{QKV}.weight": t[f"{QKV}.weight"][:-1]}), rf"{QKV}\.weight has the shape \[\d+, 64\]"),
        (lambda t: t.pop(f"{QKV}.weight"), r"self_attn\.q_proj\.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
            r"self_attn\.k_proj\.weight comes twice",
        ),
        (lambda t: t.update({f"{QKV}.weight_packed": t.pop(f"{QKV}.weight")}), "quantised as one.* --quantization"),
    ],
)
def test_a_tensor_of_several_that_is_wrong_is_named(tiny_model, tmp_path, edit, says):
    with pytest.raises(ModelError, match=says):
        check_checkpoint(edited(tiny_model("phi3-partial-rotary").path, tmp_path / "edited", edit))


def test_norms_of_16_bits_keep_what_the_offset_adds(tiny_model, tmp_path):
    """Gemma multiplies by 1 + weight; in bf16 the sum would lose most of a small weight."""
    name = "model.layers.0.input_layernorm.weight"
    path = edited(tiny_model("gemma2").path, tmp_path / "bf16", lambda t: t.update({name: torch.full((64,), 2.0**-12)}))
    weights = load_weights(check_checkpoint(path), torch.bfloat16, torch.device("cpu"), "auto", 160)
    norm, qkv = weights.layers[0].before_attention, weights.layers[0].qkv
    assert isinstance(norm, RmsNorm)
    assert norm.weight.tolist() == [1 + 2.0**-12] * 64
    assert isinstance(qkv, DenseLinear)
    assert qkv.weight.dtype is torch.bfloat16


def test_a_spec_lists_every_tensor_once(tiny_model):
    for variant in ("gemma3", "qwen3-moe", "olmo2", "gpt-oss"):
        path = tiny_model(variant).path
        spec: ModelSpec = spec_from_config(json.loads((path / "config.json").read_text()))
        names = [name for name, _ in spec.tensors()]
        assert len(names) == len(set(names))
        assert set(names) == set(check_checkpoint(path).tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "became shorter"),
    ],
)
def test_a_file_that_changed_since_it_was_checked_is_named(tiny_model, tmp_path, change, says):
    path = shutil.copytree(tiny_model("gemma3").path, tmp_path / "changed")
    info = check_checkpoint(path)
    change(path / SINGLE)
    with pytest.raises(ModelError, match=rf"{SINGLE}: .*{says}"):
        load_weights(info, torch.float32, torch.device("cpu"), "auto", 160)


def test_an_unknown_architecture_names_the_closest():
    with pytest.raises(ModelError, match="the closest is Qwen3MoeForCausalLM, and penstock models lists all of them"):
        spec_from_config({"architectures": ["Qwen3MoeOldForCausalLM"]})
