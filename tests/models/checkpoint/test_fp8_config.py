"""Checkpoints in fp8: what their config.json may say, which files fit it, and what runs; every error names the field or
tensor, and the remedy. Their weights, as their tools write them, are in quantized/."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.config import quantization_from_config
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout
from penstock.models.errors import ModelError

FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def compressed(weights, inputs=None, storage="float-quantized"):
    """As llm-compressor says it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": storage, "config_groups": {"group_0": group}}


def parse(quantization):
    return quantization_from_config({"quantization_config": quantization})


def test_published_configs_of_fp8():
    """As published with Llama 3.1 8B's versions FP8-dynamic and FP8, with Qwen3's FP8, and by AutoFP8."""
    scheme = parse(compressed(FP8_WEIGHTS, FP8_INPUTS)).scheme_of(Q_PROJ)
    assert (scheme.layout, scheme.bits, scheme.rows, scheme.group) == (QuantLayout.FP8, 8, 1, 0)
    assert scheme.narrows_inputs
    static = {**FP8_INPUTS, "strategy": "tensor", "dynamic": False, "observer": "minmax"}
    by_tensor = {**FP8_WEIGHTS, "strategy": "tensor"}
    scheme = parse(compressed(by_tensor, static, "naive-quantized")).scheme_of(Q_PROJ)
    assert (scheme.num_row_groups(4096), scheme.num_groups(4096)) == (1, 1)
    assert not parse(compressed(by_tensor)).scheme_of(Q_PROJ).narrows_inputs
    by_block = {**FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]}
    by_group = {**FP8_INPUTS, "strategy": "group", "group_size": 128}
    for config in (FP8, compressed(by_block, by_group)):
        scheme = parse(config).scheme_of(Q_PROJ)
        assert (scheme.num_row_groups(300), scheme.num_groups(4096)) == (3, 32)
        assert scheme.narrows_inputs
    skipping = parse({**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]})
    assert (skipping.scheme_of("lm_head"), skipping.scheme_of("model.layers.0.mlp.gate")) == (None, None)
    assert skipping.scheme_of("model.layers.0.mlp.gate_proj") is not None
    of_autofp8 = parse({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    assert of_autofp8.scheme_of("lm_head") is None
    assert of_autofp8.scheme_of(Q_PROJ).num_row_groups(4096) == 1


# What a config says, and what the error must name.
REFUSED = {
    "floats of 4 bits": (compressed({**FP8_WEIGHTS, "num_bits": 4}), "weights.num_bits is 4"),
    "floats in groups": (compressed({**FP8_WEIGHTS, "strategy": "group", "group_size": 128}), "weights.strategy"),
    "floats with zero points": (compressed({**FP8_WEIGHTS, "symmetric": False}), "symmetric"),
    "floats in blocks that are not named": (
        compressed({**FP8_WEIGHTS, "strategy": "block"}),
        "weights.block_structure is None",
    ),
    "floats by whole numbers": (
        compressed(FP8_WEIGHTS, {**FP8_INPUTS, "type": "int"}),
        "input_activations.type is 'int'",
    ),
    "floats by inputs of 4 bits": (
        compressed(FP8_WEIGHTS, {**FP8_INPUTS, "num_bits": 4}),
        "input_activations.num_bits is 4",
    ),
    "floats by inputs with zero points": (
        compressed(FP8_WEIGHTS, {**FP8_INPUTS, "symmetric": False}),
        "input_activations.symmetric",
    ),
    "fp8 of the other kind": ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "fp8 in blocks of 48 columns": ({**FP8, "weight_block_size": [128, 48]}, "weight_block_size is [128, 48]"),
    "fp8 in cubes": ({**FP8, "weight_block_size": [128, 128, 128]}, "weight_block_size"),
    "fp8 with scales in bytes": ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    "fp8 of unknown inputs": ({**FP8, "activation_scheme": "none"}, "activation_scheme is 'none'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_with_the_remedy(name):
    quantization, says = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        parse(quantization)
    text = str(caught.value)
    assert text.startswith("config.json: quantization_config.")
    assert says in text
    assert text.count(": ") >= 2  # what is wrong, then what to do


@pytest.fixture
def fp8(tiny_model, tmp_path):
    """A checkpoint of the right form, in blocks of 48 rows and 32 columns, its numbers meaningless."""
    tiny_model("llama").module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 48), columns // 32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**FP8, "weight_block_size": [48, 32]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def replace(path, name, value):
    """Puts a tensor in the place of another, or removes it."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("weight_scale_inv", None, f"tensor {Q_PROJ}.weight_scale_inv is missing"),
        ("weight_scale_inv", torch.ones(2, 3), r"weight_scale_inv has the shape [2, 3]"),
        ("weight_scale_inv", torch.tensor(1.0), r"weight_scale_inv has the shape []"),
        ("weight_scale_inv", torch.ones(2, 2, dtype=torch.uint8), "weight_scale_inv has dtype U8"),
        ("weight", torch.ones(64, 64).to(torch.float8_e5m2), "weight has dtype F8_E5M2"),
        ("weight", torch.ones(64, 64, dtype=torch.int8), "weight has dtype I8"),
        ("k_scale", torch.tensor(1.0), "k_scale has no place"),
    ],
)
def test_parts_of_fp8_that_do_not_fit_are_named(fp8, part, value, says):
    check_checkpoint(fp8)
    replace(fp8, f"{Q_PROJ}.{part}", value)
    with pytest.raises(ModelError, match=re.escape(says)):
        check_checkpoint(fp8)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("k_scale", "v_scale", "k_zero_point"), "kv"),
        (("k_proj.k_scale", "v_proj.v_scale"), "kv"),
        (("k_proj.output_scale",), "k"),
        (("kv_scale",), "kv"),
    ],
)
def test_scales_of_keys_and_values_by_each_tool(fp8, worker_config, caplog, names, kinds):
    assert not check_checkpoint(fp8).kv_scales
    for name in names:
        replace(fp8, f"model.layers.1.self_attn.{name}", torch.tensor(0.5))
    info = check_checkpoint(fp8)
    assert list(info.kv_scales) == [f"model.layers.1.self_attn.{kind}_scale" for kind in kinds]
    assert not any(name.endswith(("_scale", "_zero_point")) for name in info.tensors)
    with caplog.at_level("INFO"):
        load_backend(worker_config(fp8, backend="reference"))
    line = f"{fp8}: its {len(kinds)} scales of keys and values are not used: they are for --kv-cache-dtype fp8"
    assert line in caplog.messages


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.ones(3), "k_scale has the shape [3], and config.json calls for [2]"),
        (torch.ones(2, dtype=torch.int32), "k_scale has dtype I32: scales must be F64, F32, F16, BF16"),
    ],
)
def test_scales_of_keys_that_do_not_fit_are_named(fp8, value, says):
    replace(fp8, "model.layers.1.self_attn.k_scale", value)
    with pytest.raises(ModelError, match=re.escape(says)):
        check_checkpoint(fp8)


@pytest.mark.parametrize("config", [FP8, compressed(FP8_WEIGHTS)])
def test_a_scheme_of_keys_and_values_is_left_out(config):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantised, plain = parse({**config, "kv_cache_scheme": scheme}), parse(config)
    assert quantised.method == plain.method
    assert quantised.scheme_of(Q_PROJ) == plain.scheme_of(Q_PROJ)


def test_every_fp8_is_read_as_torch_reads_it(fp8):
    codes = torch.arange(256, dtype=torch.uint8).repeat(16).view(64, 64).view(torch.float8_e4m3fn)
    replace(fp8, f"{Q_PROJ}.weight", codes)
    wide = torch.from_numpy(read_matrix(check_checkpoint(fp8).quantized[Q_PROJ]).dequantized())
    torch.testing.assert_close(wide, codes.float(), rtol=0, atol=0, equal_nan=True)


def test_the_cpu_backend_quantises_only_to_integers(tiny_model, worker_config):
    config = worker_config(tiny_model("llama").path, backend="cpu", quantization="fp8")
    with pytest.raises(ModelError, match="--backend cpu: --quantization fp8 is for the backend cuda: give int8"):
        load_backend(config)


def test_fp8_of_a_checkpoint_is_not_that_of_the_flag(fp8, worker_config):
    facts = load_backend(worker_config(fp8, backend="reference", quantization="fp8")).facts
    assert (facts.quantization, facts.dtype) == ("fp8", "float32")
