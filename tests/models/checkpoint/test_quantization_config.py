"""What config.json may say of quantisation, which files fit it, and which flags; every error names the field or tensor,
and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.config import choose_quantization, quantization_from_config
from penstock.models.checkpoint.quantization.layout import CODES_PER_WORD
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout
from penstock.models.errors import ModelError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

Q_PROJ = "model.layers.0.self_attn.q_proj"


def compressed(weights: dict[str, Any], storage: str = "pack-quantized", **group: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": storage, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **group}},
    }  # fmt: skip


W4A16 = compressed(INT4_WEIGHTS)
W8A8 = compressed(INT8_WEIGHTS, "int-quantized", input_activations=INT8_INPUTS)


def parse(quantization):
    return quantization_from_config({"quantization_config": quantization})


def test_published_configs():
    """As published with the 4-bit versions of Llama 3.1 8B and of Qwen2.5, the fields that matter here."""
    gptq = parse({**GPTQ, "damp_percent": 0.01, "desc_act": True, "true_sequential": True, "static_groups": False})
    scheme = gptq.scheme_of(Q_PROJ)
    assert (scheme.layout, scheme.bits, scheme.group, scheme.is_ordered) == (QuantLayout.GPTQ, 4, 128, True)
    assert parse({**GPTQ, "checkpoint_format": "gptq_v2"}).scheme_of(Q_PROJ).layout is QuantLayout.GPTQ_V2
    assert parse({**GPTQ, "group_size": -1}).scheme_of(Q_PROJ).num_groups(4096) == 1
    awq = parse({**AWQ, "modules_to_not_convert": ["gate", "layers.3"]})
    assert awq.scheme_of("model.layers.0.mlp.gate_proj").layout is QuantLayout.AWQ
    assert awq.scheme_of("model.layers.0.mlp.gate") is None
    assert awq.scheme_of("model.layers.3.mlp.up_proj") is None
    assert awq.scheme_of("model.layers.30.mlp.up_proj") is not None
    empty: dict[str, Any] = {
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": 1.5,
    }
    w8a8 = parse({**W8A8, **empty, "quantization_status": "frozen"})
    assert (w8a8.scheme_of(Q_PROJ).bits, w8a8.scheme_of("lm_head")) == (8, None)
    assert parse(None) is None


@pytest.mark.parametrize(
    ("actorder", "ordered"),
    [(None, False), ("weight", False), ("static", False), ("group", True), ("dynamic", True), (True, True)],
)
def test_only_some_orders_of_activations_are_in_the_file(actorder, ordered):
    assert parse(compressed({**INT4_WEIGHTS, "actorder": actorder})).scheme_of(Q_PROJ).is_ordered is ordered


def test_targets_are_names_patterns_and_classes():
    first = {"targets": ["re:.*q_proj$"], "weights": INT8_WEIGHTS, "input_activations": INT8_INPUTS,
             "format": "int-quantized"}  # fmt: skip
    second = {"targets": ["model.layers.1.mlp.up_proj"], "weights": INT4_WEIGHTS}
    both = {**W4A16, "config_groups": {"a": first, "b": second}, "ignore": ["re:model\\.layers\\.2\\."]}
    quantization = parse(both)
    assert quantization.scheme_of(Q_PROJ).bits == 8
    assert quantization.scheme_of("model.layers.1.mlp.up_proj").bits == 4
    for module in ("model.layers.1.mlp.up_proj2", "model.layers.0.self_attn.k_proj", "model.layers.2.self_attn.q_proj"):
        assert quantization.scheme_of(module) is None


@pytest.mark.parametrize("names", ["abc", "cba", "bca"])
def test_the_most_precise_of_several_targets_counts(names):
    targets = {"a": ["Linear"], "b": ["re:.*down_proj$"], "c": ["model.layers.1.mlp.down_proj"]}
    sizes = {"a": 128, "b": 64, "c": 32}
    groups = {
        name: {"targets": targets[name], "weights": {**INT4_WEIGHTS, "group_size": sizes[name]}} for name in names
    }
    quantization = parse({**W4A16, "config_groups": groups})
    assert quantization.scheme_of(Q_PROJ).group == 128
    assert quantization.scheme_of("model.layers.0.mlp.down_proj").group == 64
    assert quantization.scheme_of("model.layers.1.mlp.down_proj").group == 32
    assert quantization.scheme_of("lm_head") is None


# What a config says, and what the error must name.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method is missing": ({"bits": 4}, "quant_method"),
    "method is unknown": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
    "gptq of 3 bits": ({**GPTQ, "bits": 3}, "bits is 3: it must be 4 or 8"),
    "gptq of no bits": ({**GPTQ, "bits": None}, "bits is missing"),
    "gptq of groups of 48": ({**GPTQ, "group_size": 48}, "group_size is 48"),
    "gptq of groups of 0": ({**GPTQ, "group_size": 0}, "group_size is 0"),
    "gptq without groups": ({**GPTQ, "group_size": None}, "group_size is missing"),
    "gptq for Marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "gptq in another format": ({**GPTQ, "format": "bitblas"}, "format is 'bitblas'"),
    "gptq in words of 16 bits": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype"),
    "gptq of several kinds": ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    "gptq's order is a string": ({**GPTQ, "desc_act": "yes"}, "desc_act"),
    "awq of 3 bits": ({**AWQ, "bits": 3}, "bits is 3"),
    "awq for gemv": ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
    "awq's modules are a string": ({**AWQ, "modules_to_not_convert": "gate"}, "modules_to_not_convert"),
    "no groups at all": ({**W4A16, "config_groups": {}}, "config_groups"),
    "a group that is a list": ({**W4A16, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
    "targets are missing": ({**W4A16, "config_groups": {"a": {"weights": INT4_WEIGHTS}}}, "a.targets"),
    "ignore is no pattern": ({**W4A16, "ignore": ["re:("]}, "ignore"),
    "format is missing": ({**W4A16, "format": None}, "format is missing"),
    "format of floats": (compressed(INT8_WEIGHTS, "float-quantized"), "format is 'float-quantized'"),
    "weights are rotated": ({**W4A16, "transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
    "weights are sparse": ({**W4A16, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "a type of its own": (compressed({**INT8_WEIGHTS, "type": "posit"}), "weights.type is 'posit'"),
    "floats as whole numbers": (
        compressed({**INT8_WEIGHTS, "type": "float"}, "int-quantized"), "format is 'int-quantized'"
    ),
    "packed 8 bits": (compressed({**INT4_WEIGHTS, "num_bits": 8}), "weights.num_bits is 8"),
    "one scale for all": (compressed({**INT4_WEIGHTS, "strategy": "tensor", "group_size": None}), "strategy"),
    "a strategy that is not named": (compressed({"num_bits": 4}), "strategy"),
    "channels with groups": (compressed({**INT4_WEIGHTS, "strategy": "channel"}), "strategy"),
    "weights as they come": (compressed({**INT4_WEIGHTS, "dynamic": True}), "weights.dynamic"),
    "an unknown order": (compressed({**INT4_WEIGHTS, "actorder": "random"}), "actorder is 'random'"),
    "4 bits by quantised inputs": (compressed(INT4_WEIGHTS, input_activations=INT8_INPUTS), "input_activations"),
    "quantised outputs": (compressed(INT4_WEIGHTS, output_activations=INT8_INPUTS), "output_activations"),
    "8 bits by float inputs": (compressed(INT8_WEIGHTS, "int-quantized"), "input_activations"),
    "8 bits with zero points": (
        compressed({**INT8_WEIGHTS, "symmetric": False}, "int-quantized", input_activations=INT8_INPUTS),
        "weights.symmetric",
    ),
    "8 bits in groups": (
        compressed({**INT8_WEIGHTS, "strategy": "group"}, "int-quantized", input_activations=INT8_INPUTS),
        "weights.strategy",
    ),
    "static inputs": (
        compressed(INT8_WEIGHTS, "int-quantized", input_activations={**INT8_INPUTS, "dynamic": False}),
        "input_activations.dynamic",
    ),
    "inputs with one scale": (
        compressed(INT8_WEIGHTS, "int-quantized", input_activations={**INT8_INPUTS, "strategy": "tensor"}),
        "input_activations.strategy",
    ),
    "inputs with zero points": (
        compressed(INT8_WEIGHTS, "int-quantized", input_activations={**INT8_INPUTS, "symmetric": False}),
        "input_activations.symmetric",
    ),
    "inputs of 4 bits": (
        compressed(INT8_WEIGHTS, "int-quantized", input_activations={**INT8_INPUTS, "num_bits": 4}),
        "input_activations.num_bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named_with_the_remedy(name):
    quantization, says = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        parse(quantization)
    text = str(caught.value)
    assert text.startswith("config.json: quantization_config.")
    assert says in text
    assert text.count(": ") >= 2  # what is wrong, then what to do
    assert "\n" not in text


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def gptq(tiny_model, tmp_path):
    """A checkpoint of the right form, in groups of 32, its numbers meaningless."""
    tiny_model("llama").module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        module, groups = name.removesuffix(".weight"), columns // 32
        tensors[f"{module}.qweight"] = torch.full((columns // CODES_PER_WORD, rows), 0x76543210, dtype=torch.int32)
        tensors[f"{module}.qzeros"] = torch.full((groups, rows // CODES_PER_WORD), 0x77777777, dtype=torch.int32)
        tensors[f"{module}.scales"] = torch.full((groups, rows), 0.01, dtype=torch.float16)
        tensors[f"{module}.g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
    save_file(tensors, tmp_path / "model.safetensors")
    set_config(tmp_path, {**GPTQ, "group_size": 32})
    return tmp_path


def set_config(path: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def replace(path: Path, name: str, value: torch.Tensor | None) -> None:
    """Puts a tensor in the place of another, or removes it."""
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("qweight", None, f"tensor {Q_PROJ}.qweight is missing"),
        ("qzeros", None, f"tensor {Q_PROJ}.qzeros is missing"),
        ("scales", None, f"tensor {Q_PROJ}.scales is missing"),
        ("qweight", torch.zeros(8, 65, dtype=torch.int32), "qweight has the shape [8, 65]"),
        ("qweight", torch.zeros(8, 64), "qweight has dtype F32"),
        ("qzeros", torch.zeros(1, 8, dtype=torch.int32), "qzeros has the shape [1, 8]"),
        ("scales", torch.zeros(2, 64, dtype=torch.int32), "scales has dtype I32"),
        ("g_idx", torch.zeros(64, dtype=torch.int64), "g_idx has dtype I64"),
        ("weight_packed", torch.zeros(64, 8, dtype=torch.int32), f"tensor {Q_PROJ}.weight_packed has no place"),
        ("weight", torch.zeros(64, 64), f"tensor {Q_PROJ}.g_idx has no place"),
    ],
)
def test_parts_that_do_not_fit_are_named_before_anything_is_read(gptq, part, value, says):
    check_checkpoint(gptq)
    replace(gptq, f"{Q_PROJ}.{part}", value)
    with pytest.raises(ModelError) as caught:
        check_checkpoint(gptq)
    text = str(caught.value)
    if "has no place" not in says:
        assert says in text
    else:
        assert says.rpartition(".")[0] in text
        assert "has no place" in text
    assert "config" in text


def test_columns_without_groups_are_enough_where_the_config_asks_for_none(gptq):
    replace(gptq, f"{Q_PROJ}.g_idx", None)
    assert read_matrix(check_checkpoint(gptq).quantized[Q_PROJ]).order is None
    set_config(gptq, {**GPTQ, "group_size": 32, "desc_act": True})
    with pytest.raises(ModelError, match="g_idx is missing"):
        check_checkpoint(gptq)


def test_another_groups_size_is_found_by_the_shapes(gptq):
    set_config(gptq, {**GPTQ, "group_size": 64})
    with pytest.raises(ModelError, match=r"qzeros has the shape \[2, 8\], and quantization_config .* \[1, 8\]"):
        check_checkpoint(gptq)


@pytest.mark.parametrize("groups", [[0] * 33 + [1] * 31, [0] * 32 + [2] * 32, [-1] * 32 + [1] * 32])
def test_groups_of_the_wrong_size_are_found_when_they_are_read(gptq, groups):
    replace(gptq, f"{Q_PROJ}.g_idx", torch.tensor(groups, dtype=torch.int32))
    with pytest.raises(ModelError, match=f"{Q_PROJ}.g_idx does not give each group 32 columns"):
        read_matrix(check_checkpoint(gptq).quantized[Q_PROJ])


def test_a_bias_that_the_model_has_not_must_be_zero(gptq):
    replace(gptq, f"{Q_PROJ}.bias", torch.zeros(64))
    read_matrix(check_checkpoint(gptq).quantized[Q_PROJ])
    replace(gptq, f"{Q_PROJ}.bias", torch.ones(64))
    with pytest.raises(ModelError, match=f"{Q_PROJ}.bias is not zero"):
        read_matrix(check_checkpoint(gptq).quantized[Q_PROJ])


def test_a_file_that_changed_after_the_check(gptq):
    linear = check_checkpoint(gptq).quantized[Q_PROJ]
    file = gptq / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="became shorter"):
        read_matrix(linear)
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read_matrix(linear)


def test_an_error_names_the_whole_path_of_the_config(gptq):
    set_config(gptq, {**GPTQ, "bits": 3})
    with pytest.raises(ModelError) as caught:
        check_checkpoint(gptq)
    assert str(caught.value).startswith(f"{gptq / 'config.json'}: quantization_config.bits is 3: it must be 4 or 8")


# ---------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("requested", "config", "runs"),
    [
        ("none", None, "none"),
        ("int8", None, "int8"),
        ("int4", None, "int4"),
        ("fp8", None, "fp8"),
        ("none", FP8, "fp8"),
        ("fp8", FP8, "fp8"),
        ("none", GPTQ, "gptq"),
        ("gptq", GPTQ, "gptq"),
        ("awq", AWQ, "awq"),
        ("compressed-tensors", W8A8, "compressed-tensors"),
    ],
)
def test_flags_that_fit_the_checkpoint(requested, config, runs):
    assert choose_quantization(requested, parse(config)) == runs


@pytest.mark.parametrize(
    ("requested", "config", "says"),
    [
        ("gptq", None, ["--quantization gptq", "not quantised", "leave the flag out"]),
        ("awq", GPTQ, ["--quantization awq", "gptq", "leave the flag out"]),
        ("gptq", W4A16, ["--quantization gptq", "compressed-tensors", "leave the flag out"]),
        ("int8", GPTQ, ["--quantization int8", "gptq", "unquantised checkpoint"]),
        ("int4", W8A8, ["--quantization int4", "compressed-tensors", "unquantised checkpoint"]),
        ("int8", FP8, ["--quantization int8", "already, by fp8", "unquantised checkpoint"]),
        ("fp8", W8A8, ["--quantization fp8", "already, by compressed-tensors", "leave the flag out"]),
        ("fp4", None, ["--quantization fp4", "must be one of none, int8, int4, fp8, gptq, awq, compressed-tensors"]),
    ],
)
def test_flags_that_contradict_the_checkpoint(requested, config, says):
    with pytest.raises(ModelError) as caught:
        choose_quantization(requested, parse(config))
    assert all(part in str(caught.value) for part in says), caught.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization": "int8"}, "--quantization int8: is not for the reference backend"),
        ({"quantization": "int4"}, "--quantization int4: is not for the reference backend"),
        ({"quantization": "fp8"}, "--quantization fp8: is for the backend cuda: on a CPU give int8"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: is not for the reference backend"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16: is not for the reference backend"),
        ({"quantization": "awq"}, "--quantization awq: the checkpoint is not quantised"),
    ],
)
def test_the_reference_backend_quantises_nothing(tiny_model, worker_config, changes, says):
    with pytest.raises(ModelError) as caught:
        load_backend(worker_config(tiny_model("llama").path, backend="reference", **changes))
    assert says in str(caught.value)
    assert "leave" in str(caught.value)


def test_what_runs_is_reported(gptq, worker_config):
    config = worker_config(gptq, backend="reference", quantization="gptq", kv_cache_dtype="float32")
    facts = load_backend(config).facts
    assert (facts.quantization, facts.kv_cache_dtype, facts.dtype) == ("gptq", "float32", "float32")


def test_weights_that_are_made_up_are_not_quantised(gptq, worker_config):
    config = worker_config(gptq, backend="reference", load_format="dummy")
    assert load_backend(config).facts.quantization == "none"
