"""Quantised checkpoints as their own tools write them: read, multiplied out, and served.

compressed-tensors' files are written by its library. GPTQ's and AWQ's are written here, code by code, from the layouts
of AutoGPTQ and AutoAWQ; what is read of AWQ's is compared with the library's converter too.
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
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from penstock.models.backend import load_backend
from penstock.models.checkpoint import check_checkpoint
from penstock.models.cpu_backend import objection
from penstock.models.errors import ModelError
from penstock.models.quantized_matrix import read_matrix
from penstock.scheduler.plan import SamplingParams

NUM_TOKENS = 16
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
SKIPPED = "model.layers.1.mlp.down_proj"
"""Stays float, as the config says."""
SKIPPED_SILENTLY = "model.layers.2.mlp.up_proj"
"""Stays float, as only the file says, in GPTQ and AWQ."""


@dataclass
class Stored:
    """What was written of one linear."""

    codes: np.ndarray
    scales: np.ndarray
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
        parts = linear.weight.detach().unflatten(1, (-1, args.group_size or linear.in_features))
        scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        linear.weight_scale.data.copy_(scales)
        if not args.symmetric:
            linear.weight_zero_point.data.copy_(zeros)
    compressor = ModelCompressor.from_pretrained_model(quantised, quantization_format=storage)
    compressor.compress_model(quantised)
    quantised.save_pretrained(path)
    compressor.update_config(path)
    made = Checkpoint(path, copy.deepcopy(model.module).to(dtype), "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    compressor.decompress_model(quantised)
    for name, linear in linears.items():
        weight = linear.weight.detach().clone()
        made.linears[name] = unpacked(tensors, name, weight)
        made.module.get_submodule(name).weight.data = weight
    return made


def unpacked(tensors: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> Stored:
    """What the library's own functions say of a linear's tensors."""
    scales = tensors[f"{name}.weight_scale"].float().numpy()
    groups = np.arange(weight.shape[1]) * scales.shape[1] // weight.shape[1]
    if f"{name}.weight" in tensors:
        return Stored(tensors[f"{name}.weight"].numpy(), scales, np.zeros(scales.shape), groups, weight)
    codes = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, weight.shape).numpy() + 8
    zeros = np.full(scales.shape, 8)
    if f"{name}.weight_zero_point" in tensors:
        packed = tensors[f"{name}.weight_zero_point"]
        zeros = unpack_from_int32(packed, 4, torch.Size(scales.shape), packed_dim=0).numpy() + 8
    return Stored(codes, scales, zeros, groups, weight)


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

# Name of a kind: the model's variant, and who writes it.
KINDS: dict[str, tuple[str, Callable[[Any, Path], Checkpoint]]] = {
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


# ---------------------------------------------------------------------------------------------------------------- tests


def test_codes_scales_and_zero_points_are_those_that_were_written(checkpoint):
    info = check_checkpoint(checkpoint.path)
    assert info.quantization is not None
    assert info.quantization.method == checkpoint.method
    assert info.quantized.keys() == checkpoint.linears.keys()
    for name, stored in checkpoint.linears.items():
        matrix = read_matrix(info.quantized[name])
        order = np.arange(stored.codes.shape[1]) if matrix.order is None else matrix.order
        codes = matrix.codes.view(np.int8) if matrix.bits == 8 else matrix.codes
        np.testing.assert_array_equal(codes, stored.codes[:, order])
        np.testing.assert_array_equal(matrix.scales, stored.scales)
        np.testing.assert_array_equal(matrix.zeros, stored.zeros)
        # The columns stand group by group, and those of a group in their own order.
        group = matrix.group or len(order)
        np.testing.assert_array_equal(stored.groups[order], np.arange(len(order)) // group)
        np.testing.assert_array_equal(order, np.lexsort((np.arange(len(order)), stored.groups)))
        assert (matrix.order is None) == (np.diff(stored.groups) >= 0).all()
        kinds = [array.dtype for array in (matrix.codes, matrix.scales, matrix.zeros)]
        assert kinds == [np.uint8, np.float32, np.float32]
        assert all(array.flags.c_contiguous for array in (matrix.codes, matrix.scales, matrix.zeros))


def test_weights_are_what_their_library_makes_of_them(checkpoint):
    info = check_checkpoint(checkpoint.path)
    for name, stored in checkpoint.linears.items():
        dequantised = read_matrix(info.quantized[name]).dequantized()
        assert dequantised.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(dequantised), stored.weight, rtol=0, atol=0)


async def test_greedy_output_is_that_of_transformers_with_the_same_weights(
    checkpoint, in_process, start_engine, prompts
):
    engine = await start_engine(in_process(checkpoint.path, backend="reference"))
    assert engine.engine.facts.quantization == checkpoint.method
    answers = await engine.run(prompts[2::3], SamplingParams(temperature=0.0), NUM_TOKENS)
    for prompt, answer in zip(prompts[2::3], answers, strict=True):
        with torch.inference_mode():
            logits = checkpoint.module(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("cpu_library")
async def test_the_cpu_backend_comes_close(checkpoint, in_process, start_engine, worker_config, prompts):
    """It rounds activations to bytes; whatever else it did wrong would be off by the deviation of the logits, above
    2."""
    why_not = objection(worker_config(checkpoint.path, backend="cpu"), check_checkpoint(checkpoint.path))
    if why_not is not None:  # the one kind that the next test is about
        assert why_not.startswith("its experts")
        return
    engine = await start_engine(in_process(checkpoint.path, backend="cpu"))
    assert engine.engine.facts.quantization == checkpoint.method
    [answer] = await engine.run([prompts[-1]], SamplingParams(temperature=0.0, prompt_logprobs=0), 1)
    got = torch.tensor([value for part in answer.prompt_logprobs for value in part.logprobs.chosen])
    with torch.inference_mode():
        expected = checkpoint.module(torch.tensor([prompts[-1]])).logits[0, :-1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1)).squeeze(1)
    assert (got - chosen).abs().mean() < 0.3


def test_the_cpu_backend_refuses_experts_whose_inputs_it_cannot_share(checkpoints, worker_config):
    with pytest.raises(ModelError, match="--backend cpu: its experts are quantised differently, or by act-order"):
        load_backend(worker_config(checkpoints("gptq experts").path, backend="cpu"))


def test_awq_is_what_the_librarys_converter_makes_of_it(checkpoints):
    made = checkpoints("awq")
    info = check_checkpoint(made.path)
    converted = AutoAWQConverter(group_size=32).process(load_file(made.path / "model.safetensors"))
    for name, linear in info.quantized.items():
        matrix = read_matrix(linear)
        shape = torch.Size(matrix.codes.shape)
        codes = unpack_from_int32(converted[f"{name}.weight_packed"], 4, shape).numpy() + 8
        np.testing.assert_array_equal(matrix.codes, codes)
        packed = converted[f"{name}.weight_zero_point"]
        zeros = unpack_from_int32(packed, 4, torch.Size(matrix.scales.shape), packed_dim=0).numpy() + 8
        np.testing.assert_array_equal(matrix.zeros, zeros)
        np.testing.assert_array_equal(matrix.scales, converted[f"{name}.weight_scale"].float().numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits(tiny_model, tmp_path, dtype):
    """The library multiplies in the scales' type, and so rounds the product, which is exact here."""
    schemes = [weights_of(4, strategy="group", group_size=32, symmetric=False)]
    made = save_compressed(tiny_model("qwen3"), tmp_path, schemes, "pack-quantized", dtype)
    info = check_checkpoint(tmp_path)
    assert {entry.dtype for entry in info.tensors.values()} == {"BF16" if dtype is torch.bfloat16 else "F16"}
    for name, stored in made.linears.items():
        matrix = read_matrix(info.quantized[name])
        np.testing.assert_array_equal(matrix.scales, stored.scales)
        torch.testing.assert_close(torch.from_numpy(matrix.dequantized()).to(dtype), stored.weight, rtol=0, atol=0)


def test_what_the_quantiser_skipped_stays_float(checkpoints):
    for kind in ("gptq", "w8a8"):
        info = check_checkpoint(checkpoints(kind).path)
        assert SKIPPED not in info.quantized
        assert info.tensors[f"{SKIPPED}.weight"].dtype == "F32"
        assert (SKIPPED_SILENTLY in info.quantized) == (kind == "w8a8")
        named = [name for name, _ in info.spec.tensors() if name.removesuffix(".weight") not in info.quantized]
        assert list(info.tensors) == named
