"""Writes quantised checkpoints as their own tools do.

compressed-tensors' files are written by its library, and those of fp8 by transformers. GPTQ's and AWQ's are written
here, code by code, from the layouts of AutoGPTQ and AutoAWQ.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
Kind = tuple[str, Callable[[Any, Path], "Checkpoint"]]
"""Of a checkpoint: the model's variant, and who writes it."""
SKIPPED = "model.layers.1.mlp.down_proj"
SKIPPED_SILENTLY = "model.layers.2.mlp.up_proj"


@dataclass
class Stored:
    """What was written of one linear."""

    codes: np.ndarray
    """Of fp8, its bytes."""
    scales: np.ndarray
    """Of each row and group."""
    zeros: np.ndarray
    groups: np.ndarray
    """Of each column."""
    weight: torch.Tensor
    """As whoever packed it says."""


@dataclass
class Checkpoint:
    """A quantised checkpoint, and transformers' model with the weights multiplied out."""

    path: Path
    module: Any
    method: str
    linears: dict[str, Stored] = field(default_factory=dict)
    skipped: str = SKIPPED
    """Stays float, as the config says."""
    skipped_silently: str = SKIPPED_SILENTLY
    """Stays float, as only the file says, in GPTQ, AWQ and the method fp8."""
    is_fp8: bool = False
    """Whether all its codes are floats."""


# -------------------------------------------------------------------------------------------------------- GPTQ and AWQ


def quantise(weight: torch.Tensor, groups: np.ndarray, symmetric: bool) -> Stored:
    """Four bits a weight; the scale is rounded to float16."""
    values = weight.numpy()
    count = int(groups.max()) + 1
    scales, zeros = np.zeros((len(values), count), np.float16), np.full((len(values), count), 8)
    for group in range(count):
        part = values[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, group] = np.maximum(-low, high) / 7
        else:
            scales[:, group] = (high - low) / 15
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 0, 15)
    scales = scales.astype(np.float32)
    codes = np.clip(np.rint(values / scales[:, groups]) + zeros[:, groups], 0, 15).astype(np.int64)
    dequantised = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    return Stored(codes, scales, zeros, groups, torch.from_numpy(dequantised))


def word(codes: Any) -> int:
    """Eight codes as an int32, the first one lowest."""
    value = sum(int(code) << 4 * place for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def words(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def gptq_tensors(linear: Stored, version: int) -> dict[str, torch.Tensor]:
    """AutoGPTQ's: codes (in, out) and zero points (groups, out); a word holds eight inputs, or eight outputs."""
    rows, columns = linear.codes.shape
    qweight = [[word(linear.codes[row, begin : begin + 8]) for row in range(rows)] for begin in range(0, columns, 8)]
    qzeros = [[word(zeros[begin : begin + 8]) for begin in range(0, rows, 8)] for zeros in linear.zeros.T]
    if version == 1:
        qzeros = [[(value - 0x11111111 + (1 << 31)) % (1 << 32) - (1 << 31) for value in line] for line in qzeros]
    return {
        "qweight": words(qweight),
        "qzeros": words(qzeros),
        "scales": torch.from_numpy(linear.scales.T.copy()).half(),
        "g_idx": torch.from_numpy(linear.groups).int(),
    }


def awq_tensors(linear: Stored) -> dict[str, torch.Tensor]:
    """AutoAWQ's gemm: codes (in, out) and zero points (groups, out); a word holds eight outputs, interleaved."""

    def packed(lines: np.ndarray) -> torch.Tensor:
        return words(
            [[word(line[begin + row] for row in AWQ_ROWS) for begin in range(0, len(line), 8)] for line in lines]
        )

    scales = torch.from_numpy(linear.scales.T.copy()).half()
    return {"qweight": packed(linear.codes.T), "qzeros": packed(linear.zeros.T), "scales": scales}


def save_four_bits(
    model: Any, path: Path, method: str, group: int, *, symmetric: bool = False, ordered: bool = False, version: int = 1
) -> Checkpoint:
    """A checkpoint of AutoGPTQ's or AutoAWQ's. Two of its linears stay float, and so do routers of experts."""
    model.module.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    dequantised = dict(tensors)
    linears = {}
    rng = np.random.default_rng(11)
    for weight, values in dequantised.items():
        name = weight.removesuffix(".weight")
        if values.ndim != 2 or "layers" not in name or name.endswith(".gate") or name in (SKIPPED, SKIPPED_SILENTLY):
            continue
        rows, columns = values.shape
        groups = np.arange(columns) // (group if group > 0 else columns)
        stored = quantise(values, rng.permutation(groups) if ordered else groups, symmetric)
        parts = awq_tensors(stored) if method == "awq" else gptq_tensors(stored, version)
        if ordered and f"{name}.bias" not in tensors:
            parts["bias"] = torch.zeros(rows)
        del tensors[weight]
        tensors.update({f"{name}.{part}": value.contiguous() for part, value in parts.items()})
        dequantised[weight] = stored.weight
        linears[renamed(name)] = stored
    save_file(dequantised, path / "model.safetensors", {"format": "pt"})
    module = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    save_file(tensors, path / "model.safetensors")
    form: dict[str, Any] = {"version": "gemm", "zero_point": True}
    if method == "gptq":
        form = {"desc_act": ordered, "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    form |= {"quant_method": method, "bits": 4, "group_size": group, "modules_to_not_convert": [SKIPPED]}
    write_config(path, form)
    return Checkpoint(path, module, method, linears)


def renamed(name: str) -> str:
    """What Mixtral's linears are called here."""
    parts = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return ".".join(parts.get(part, part) for part in name.split("."))


def write_config(path: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


# --------------------------------------------------------------------------------------------------- compressed-tensors


def weights_of(bits: int, **changes: Any) -> QuantizationScheme:
    """A scheme for all linears."""
    activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if bits == 8 else None
    weights = QuantizationArgs(num_bits=bits, **changes)
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)


def save_compressed(
    model: Any, path: Path, schemes: list[QuantizationScheme], storage: str | None, dtype: torch.dtype = torch.float32
) -> Checkpoint:
    """What the library writes. The scales come from each group's least and greatest weight."""
    quantised = copy.deepcopy(model.module).to(dtype)
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    ignore = ["lm_head", "re:" + SKIPPED.replace(".", r"\.")]
    config = QuantizationConfig(config_groups=groups, ignore=ignore, quantization_status="frozen")
    apply_quantization_config(quantised, config)
    linears = {n: m for n, m in quantised.named_modules() if getattr(m, "quantization_scheme", None) is not None}
    for linear in linears.values():
        args = linear.quantization_scheme.weights
        parts = parts_with_scales(linear.weight.detach(), args)
        scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        linear.weight_scale.data.copy_(scales)
        if hasattr(linear, "input_scale"):
            linear.input_scale.data.fill_(0.01)  # is not used
        if not args.symmetric:
            linear.weight_zero_point.data.copy_(zeros)
    compressor = ModelCompressor.from_pretrained_model(quantised, quantization_format=storage)
    compressor.compress_model(quantised)
    quantised.save_pretrained(path)
    compressor.update_config(path)
    made = Checkpoint(path, copy.deepcopy(model.module).to(dtype), "compressed-tensors")
    made.is_fp8 = all(scheme.weights.type == QuantizationType.FLOAT for scheme in schemes)
    tensors = load_file(path / "model.safetensors")
    compressor.decompress_model(quantised)
    for name, linear in linears.items():
        weight = linear.weight.detach().clone()
        made.linears[name] = unpacked(tensors, name, weight, linear.quantization_scheme.weights)
        made.module.get_submodule(name).weight.data = weight
    return made


def parts_with_scales(weight: Any, args: QuantizationArgs) -> Any:
    """The last dimension of the result shares a scale."""
    match args.strategy:
        case QuantizationStrategy.TENSOR:
            return weight.flatten()[None]
        case QuantizationStrategy.BLOCK:
            rows, columns = args.block_structure
            padded = functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
            return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).swapaxes(1, 2).flatten(2)
        case _:
            return weight.unflatten(1, (-1, args.group_size or weight.shape[1]))


def unpacked(tensors: dict[str, torch.Tensor], name: str, weight: torch.Tensor, args: QuantizationArgs) -> Stored:
    """What the library's own functions say of a linear's tensors."""
    scales = tensors[f"{name}.weight_scale"].float().numpy()
    if args.type == QuantizationType.FLOAT:
        shared = len(weight) if args.strategy == QuantizationStrategy.TENSOR else 1
        rows, columns = args.block_structure or (shared, weight.shape[1])
        return stored_fp8(tensors[f"{name}.weight"], scales, rows, columns, weight)
    groups = np.arange(weight.shape[1]) * scales.shape[1] // weight.shape[1]
    if f"{name}.weight" in tensors:
        return Stored(tensors[f"{name}.weight"].numpy(), scales, np.zeros(scales.shape), groups, weight)
    codes = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, weight.shape).numpy() + 8
    zeros = np.full(scales.shape, 8)
    if f"{name}.weight_zero_point" in tensors:
        packed = tensors[f"{name}.weight_zero_point"]
        zeros = unpack_from_int32(packed, 4, torch.Size(scales.shape), packed_dim=0).numpy() + 8
    return Stored(codes, scales, zeros, groups, weight)


def stored_fp8(codes: torch.Tensor, scales: np.ndarray, rows: int, columns: int, weight: torch.Tensor) -> Stored:
    """Of blocks of so many rows and columns."""
    groups = np.arange(codes.shape[1]) // columns
    by_row = np.repeat(scales.reshape(-1, groups[-1] + 1), rows, axis=0)[: len(codes)]
    return Stored(codes.view(torch.uint8).numpy(), by_row, np.zeros(by_row.shape), groups, weight)


def save_fp8(model: Any, path: Path, block: tuple[int, int] | None, *, is_of_autofp8: bool = False) -> Checkpoint:
    """What transformers writes of the method fp8, by blocks or by tensors; or by tensors under AutoFP8's names."""
    of_blocks: dict[str, Any] = {"weight_block_size": block, "modules_to_not_convert": [SKIPPED]}
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**of_blocks))
    quantize: Any = Fp8Quantize(quantizer)
    dequantize: Any = Fp8Dequantize(quantizer)
    model.module.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    made = Checkpoint(path, copy.deepcopy(model.module), "fp8", is_fp8=True)
    for name, linear in made.module.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name in ("lm_head", SKIPPED, SKIPPED_SILENTLY):
            continue
        written = quantize.convert({"weight": tensors.pop(f"{name}.weight")})
        codes, scales = written["weight"], written["weight_scale_inv"]
        [linear.weight.data] = dequantize.convert({"weight": codes, "weight_scale_inv": scales}).values()
        rows, columns = block or codes.shape
        made.linears[name] = stored_fp8(codes, scales.numpy(), rows, columns, linear.weight.data)
        tensors[f"{name}.weight"] = codes
        if is_of_autofp8:
            tensors |= {f"{name}.weight_scale": scales[0, 0], f"{name}.input_scale": torch.tensor(0.01)}
        else:
            tensors[f"{name}.weight_scale_inv"] = scales
    save_file({name: values.contiguous() for name, values in tensors.items()}, path / "model.safetensors")
    config = FineGrainedFP8Config(**of_blocks).to_dict()
    if is_of_autofp8:
        config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [SKIPPED]}
    write_config(path, config)
    return made


def save_ordered_compressed(model: Any, path: Path) -> Checkpoint:
    """A checkpoint whose columns say their groups, which the library could write until 2026."""
    made = save_compressed(model, path, [weights_of(4, strategy="group", group_size=32)], "pack-quantized")
    tensors = load_file(path / "model.safetensors")
    rng = np.random.default_rng(5)
    for name, linear in made.linears.items():
        float_weight = model.module.get_submodule(name).weight.detach()
        stored = quantise(float_weight, rng.permutation(linear.groups), symmetric=True)
        tensors[f"{name}.weight_packed"] = pack_to_int32(torch.from_numpy(stored.codes - 8).to(torch.int8), 4)
        tensors[f"{name}.weight_scale"] = torch.from_numpy(stored.scales)
        tensors[f"{name}.weight_g_idx"] = torch.from_numpy(stored.groups).int()
        made.module.get_submodule(name).weight.data = stored.weight
        made.linears[name] = stored
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    write_config(path, config)
    return made


ATTENTION_INT8 = QuantizationScheme(
    targets=["re:.*self_attn.*"], weights=weights_of(8, strategy="channel").weights,
    input_activations=weights_of(8, strategy="channel").input_activations, format="int-quantized",
)  # fmt: skip
MLP_INT4 = QuantizationScheme(
    targets=["re:.*mlp.*"], weights=weights_of(4, strategy="group", group_size=32).weights, format="pack-quantized"
)


def compressed_fp8(strategy: str, inputs: dict[str, Any] | None = None, **changes: Any) -> Kind:
    """All linears in fp8; ``inputs``: how activations are quantised."""
    activations = None if inputs is None else QuantizationArgs(num_bits=8, type="float", **inputs)
    weights = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **changes)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    return "llama", lambda model, path: save_compressed(model, path, [scheme], "float-quantized")


BY_GROUPS_OF_64 = {"strategy": "group", "group_size": 64, "dynamic": True}

KINDS: dict[str, Kind] = {
    "gptq": ("llama", lambda m, p: save_four_bits(m, p, "gptq", 32, symmetric=True)),
    "gptq zero points": ("qwen2-tied", lambda m, p: save_four_bits(m, p, "gptq", 64)),
    "gptq v2": ("qwen3", lambda m, p: save_four_bits(m, p, "gptq", 32, version=2)),
    "gptq act-order": ("qwen2-tied", lambda m, p: save_four_bits(m, p, "gptq", 32, ordered=True)),
    "gptq act-order, last group short": ("llama", lambda m, p: save_four_bits(m, p, "gptq", 64, ordered=True)),
    "gptq one group": ("llama", lambda m, p: save_four_bits(m, p, "gptq", -1)),
    "gptq experts": ("qwen3-moe", lambda m, p: save_four_bits(m, p, "gptq", 32, ordered=True)),
    "awq experts": ("mixtral", lambda m, p: save_four_bits(m, p, "awq", 32)),
    "awq": ("qwen2-tied", lambda m, p: save_four_bits(m, p, "awq", 32)),
    "awq one group": ("llama", lambda m, p: save_four_bits(m, p, "awq", -1)),
    "w4a16": (
        "llama",
        lambda m, p: save_compressed(m, p, [weights_of(4, strategy="group", group_size=32)], "pack-quantized"),
    ),
    "w4a16 zero points": (
        "qwen3",
        lambda m, p: save_compressed(
            m, p, [weights_of(4, strategy="group", group_size=32, symmetric=False)], "pack-quantized"
        ),
    ),
    "w4a16 channels": (
        "qwen2-tied",
        lambda m, p: save_compressed(m, p, [weights_of(4, strategy="channel", symmetric=False)], "pack-quantized"),
    ),
    "w4a16 act-order": ("llama", save_ordered_compressed),
    "w8a8": ("qwen2-tied", lambda m, p: save_compressed(m, p, [weights_of(8, strategy="channel")], "int-quantized")),
    "w8a8 naive": ("llama", lambda m, p: save_compressed(m, p, [weights_of(8, strategy="channel")], "naive-quantized")),
    "fp8 channels": compressed_fp8("channel", {"strategy": "token", "dynamic": True}),
    "fp8 tensors, static inputs": compressed_fp8("tensor", {"strategy": "tensor"}),
    "fp8 blocks, the last ones short": compressed_fp8("block", BY_GROUPS_OF_64, block_structure=[80, 64]),
    "fp8 blocks of weights alone": compressed_fp8("block", block_structure=[80, 64]),
    "fp8 weights alone": compressed_fp8("channel"),
    "fp8 of transformers": ("llama", lambda m, p: save_fp8(m, p, (32, 32))),
    "fp8 of transformers, tensors": ("qwen2-tied", lambda m, p: save_fp8(m, p, None)),
    "fp8 of AutoFP8": ("llama", lambda m, p: save_fp8(m, p, None, is_of_autofp8=True)),
    "w8a8 and w4a16": ("qwen3", lambda m, p: save_compressed(m, p, [ATTENTION_INT8, MLP_INT4], None)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tiny_model):
    """The checkpoint of a kind; each is made once."""
    made: dict[str, Checkpoint] = {}

    def get(kind: str) -> Checkpoint:
        if kind not in made:
            variant, save = KINDS[kind]
            made[kind] = save(tiny_model(variant), tmp_path_factory.mktemp("quantised"))
        return made[kind]

    return get


@pytest.fixture(params=list(KINDS))
def checkpoint(request, checkpoints):
    """Every kind in turn."""
    return checkpoints(request.param)


@pytest.fixture
def compressed(tmp_path, tiny_model):
    """Of a dtype, a checkpoint that compressed-tensors writes in it, with groups and zero points."""

    def save(dtype: torch.dtype) -> Checkpoint:
        schemes = [weights_of(4, strategy="group", group_size=32, symmetric=False)]
        return save_compressed(tiny_model("qwen3"), tmp_path, schemes, "pack-quantized", dtype)

    return save
