"""Checkpoints of NVIDIA's Model Optimizer. Names, shapes and configs are those that version 0.47.0 wrote."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from safetensors.torch import load_file, save_file

from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.config import quantization_from_config
from penstock.models.checkpoint.quantization.modelopt import HF_QUANT_CONFIG
from penstock.models.checkpoint.quantization.reader import read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout
from penstock.models.errors import ModelError
from penstock.scheduler.plan import SamplingParams

FP8_MAX, FP4_MAX = 448.0, 6.0
Q_PROJ = "model.layers.0.self_attn.q_proj"


def fp8(weight: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> tuple[dict[str, Any], torch.Tensor]:
    """A linear's tensors, and its weight multiplied out: blocks of rows and columns share a scale."""
    rows, columns = block
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (row blocks, rows, column blocks, columns)
    scales = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    parts = {"weight": codes.reshape(weight.shape), "weight_scale": scales.reshape(shape)}
    return parts, (codes.float() * scales).reshape(weight.shape)


def nvfp4(weight: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """The same in four bits: groups of 16 columns share a scale in fp8, and all a second one."""
    groups = weight.unflatten(1, (-1, 16))
    second = weight.abs().max() / (FP4_MAX * FP8_MAX)
    scales = (groups.abs().amax(2, keepdim=True) / FP4_MAX / second).to(torch.float8_e4m3fn)
    expanded = scales.float() * second
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = values[((groups / expanded).abs()[..., None] - values).abs().argmin(-1)] * groups.sign()
    packed = pack_fp4_to_uint8(nearest.reshape(weight.shape))
    unpacked = unpack_fp4_from_uint8(packed, *weight.shape, dtype=torch.float32).unflatten(1, (-1, 16))
    parts = {"weight": packed, "weight_scale": scales.squeeze(2), "weight_scale_2": second}
    return {**parts, "input_scale": torch.tensor(0.01)}, (unpacked * expanded).reshape(weight.shape)


def stored(weight: torch.Tensor, algorithm: str) -> tuple[dict[str, Any], torch.Tensor]:
    rows, columns = weight.shape
    match algorithm:
        case "NVFP4":
            return nvfp4(weight)
        case "FP8":
            parts, expanded = fp8(weight, (rows, columns), ())
            return {**parts, "input_scale": torch.tensor(0.01)}, expanded
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return fp8(weight, (1, columns), (rows,))
        case _:
            return fp8(weight, (128, 128), (rows // 128, 1, columns // 128, 1))


@pytest.fixture(scope="module", params=["NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo"])
def checkpoint(request, tmp_path_factory, build_model):
    """The path of a checkpoint, and transformers' model with its weights multiplied out."""
    path, algorithm = tmp_path_factory.mktemp("modelopt"), request.param
    sizes = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    build_model(path, "Qwen3Config", sizes)
    tensors = load_file(path / "model.safetensors")
    dequantised = dict(tensors)
    for name, weight in dequantised.items():
        if weight.ndim == 2 and "layers" in name:
            parts, dequantised[name] = stored(tensors.pop(name).float(), algorithm)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
    save_file(dequantised, path / "model.safetensors", {"format": "pt"})
    module = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
    described = {"quant_algo": algorithm, "ignore": ["lm_head", "model.embed_tokens"], "quant_method": "modelopt"}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return path, module


def test_weights_are_those_that_were_written(checkpoint):
    path, module = checkpoint
    info = check_checkpoint(path)
    assert len(info.quantized) == 7 * info.spec.num_layers
    for name, linear in info.quantized.items():
        expected = module.get_submodule(name).weight.detach().numpy()
        np.testing.assert_allclose(read_matrix(linear).dequantized(), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("cpu_library")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
async def test_tokens_are_those_of_transformers(checkpoint, backend, in_process, start_engine, prompts):
    path, module = checkpoint
    engine = await start_engine(in_process(path, backend=backend, dtype="float32"))
    assert engine.engine.facts.quantization == "modelopt"
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0), 8)
    with torch.inference_mode():
        logits = module(torch.tensor([prompts[-1] + answer.token_ids])).logits[0, len(prompts[-1]) - 1 : -1]
    assert answer.token_ids == logits.argmax(-1).tolist()


def parse(**changes):
    return quantization_from_config({"quantization_config": {"quant_method": "modelopt", **changes}})


def test_modules_are_excluded_by_wildcards():
    excluded = ["lm_head", "model.layers.1.self_attn*", "*.mlp.gate"]
    for name in ("ignore", "exclude_modules"):
        found = parse(quant_algo="FP8", **{name: excluded})
        assert found.scheme_of(Q_PROJ).layout is QuantLayout.FP8
        assert found.scheme_of("model.layers.0.mlp.gate_proj") is not None
        for module in ("lm_head", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate"):
            assert found.scheme_of(module) is None, module


def test_layers_of_mixed_precision_have_their_own_schemes():
    layers = {Q_PROJ: {"quant_algo": "FP8"}, "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    found = parse(quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found.scheme_of(Q_PROJ).layout is QuantLayout.FP8
    assert found.scheme_of("model.layers.0.mlp.up_proj").layout is QuantLayout.NVFP4
    assert found.scheme_of("model.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": 8}, "quant_algo is 8: it must be a string"),
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ': it must be one of FP8"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32: it must be 16"),
        ({"quant_algo": "FP8", "ignore": ["?" * 2000]}, "ignore is .* pattern that cannot be read"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {Q_PROJ: {"quant_algo": "MXFP8"}}}, "MXFP8"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"re:(": {"quant_algo": "FP8"}}}, "quantized_layers is"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_weights_are_floats_if_only_the_kv_cache_is_quantised():
    assert parse(kv_cache_scheme={"type": "float", "num_bits": 8}) is None


def test_a_missing_scale_is_named(checkpoint, tmp_path):
    path, _ = checkpoint
    tensors = load_file(path / "model.safetensors")
    scale = "weight_scale_2" if f"{Q_PROJ}.weight_scale_2" in tensors else "weight_scale"
    del tensors[f"{Q_PROJ}.{scale}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(path / "config.json")
    with pytest.raises(ModelError, match=rf"{Q_PROJ}\.{scale}\w* is missing"):
        check_checkpoint(tmp_path)


def test_older_checkpoints_have_a_file_of_their_own(checkpoint, tmp_path):
    path, _ = checkpoint
    config = json.loads((path / "config.json").read_text())
    described = config.pop("quantization_config")
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": described["quant_algo"], "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": quantization}))
    assert check_checkpoint(tmp_path).quantized.keys() == check_checkpoint(path).quantized.keys()
    (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": {"quant_algo": "INT3"}}))
    with pytest.raises(ModelError, match=rf"{HF_QUANT_CONFIG}: quant.*\.quant_algo is 'INT3': it must be one of FP8"):
        check_checkpoint(tmp_path)
