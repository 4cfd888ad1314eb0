"""Finds the tensors that make up each quantised linear and checks their shapes and dtypes. Reads no tensor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.rope import row_order
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.quantization.scheme import Quantization, QuantLayout, QuantScheme
from penstock.models.errors import ModelError

CODES_PER_WORD = 8
"""Four-bit codes in an int32."""
WORD_BITS = 32

FLOATS = ("F32", "F16", "BF16")
INT32 = ("I32",)
INT8 = ("I8",)
FP8 = ("F8_E4M3",)
PAIRS = ("U8",)
MX_SCALES = ("U8", "F8_E8M0")

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class QuantizedLinear:
    """A linear whose weight is stored quantised. Every part has the shape and the dtype of the scheme."""

    name: str
    """The module's name, such as ``model.layers.0.self_attn.q_proj``."""
    scheme: QuantScheme
    rows: int
    """The number of outputs."""
    columns: int
    """The number of inputs."""
    parts: Mapping[str, TensorEntry]
    """The stored tensors by part name, such as ``qweight``."""
    row_order: NDArray[np.int64] | None = field(default=None, compare=False)
    """The order in which a backend gets the rows; None: that of the checkpoint."""


@dataclass(frozen=True)
class _StoredTensor:
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_needed: bool = True


def find_quantized(
    quantization: Quantization | None,
    spec: ModelSpec,
    entries: Mapping[str, TensorEntry],
    path: Path,
    stored_name: Callable[[str], str],
) -> dict[str, QuantizedLinear]:
    """Returns the linears that are stored quantised, by name. ``stored_name`` returns the checkpoint's name of a
    tensor, for errors. Raises ModelError if a part is missing or wrong."""
    if quantization is None:
        return {}
    shapes = dict(spec.tensors())
    found = {}
    for weight, shape in shapes.items():
        name = weight.removesuffix(".weight")
        if name in (weight, EMBEDDING) or len(shape) != 2:
            continue
        scheme = quantization.scheme_of(name)
        whole = entries.get(weight)
        if scheme is None or (whole is not None and whole.dtype not in INT8 + FP8 + PAIRS):
            continue
        rows, columns = shape
        wanted = _wanted_parts(scheme, rows, columns)
        if scheme.layout is QuantLayout.FP8 and f"{name}.weight_scale" not in entries:
            wanted["weight_scale_inv"] = wanted.pop("weight_scale")  # transformers' name
        if scheme.layout is QuantLayout.MXFP4 and f"{name}.weight_packed" in entries:  # compressed-tensors' names
            wanted = {
                "weight_packed": _StoredTensor((rows, -(-columns // 2)), PAIRS),
                "weight_scale": wanted["scales"],
            }
        if scheme.layout is QuantLayout.NVFP4 and quantization.method == "modelopt":
            wanted = {
                "weight": wanted["weight_packed"],
                "weight_scale": wanted["weight_scale"],
                "weight_scale_2": wanted["weight_global_scale"],
                "input_scale": wanted["input_global_scale"],
            }
        if f"{name}.bias" in shapes:
            wanted.pop("bias", None)
        parts = {part: _match(f"{name}.{part}", want, entries, path, stored_name) for part, want in wanted.items()}
        stored = {part: entry for part, entry in parts.items() if entry is not None}
        found[name] = QuantizedLinear(name, scheme, rows, columns, stored, row_order(spec, name))
    return found


def _wanted_parts(scheme: QuantScheme, rows: int, columns: int) -> dict[str, _StoredTensor]:
    groups = scheme.num_groups(columns)
    per_word = WORD_BITS // scheme.bits
    row_words, column_words = -(-rows // per_word), -(-columns // per_word)
    match scheme.layout:
        case QuantLayout.GPTQ | QuantLayout.GPTQ_V2:
            return {
                "qweight": _StoredTensor((column_words, rows), INT32),
                "qzeros": _StoredTensor((groups, row_words), INT32),
                "scales": _StoredTensor((groups, rows), FLOATS),
                "g_idx": _StoredTensor((columns,), INT32, scheme.is_ordered),
                # Old versions of AutoGPTQ wrote zeros for linears without a bias.
                "bias": _StoredTensor((rows,), FLOATS, False),
            }
        case QuantLayout.AWQ:
            return {
                "qweight": _StoredTensor((columns, row_words), INT32),
                "qzeros": _StoredTensor((groups, row_words), INT32),
                "scales": _StoredTensor((groups, rows), FLOATS),
            }
        case QuantLayout.PACKED:
            parts = {
                "weight_packed": _StoredTensor((rows, column_words), INT32),
                "weight_scale": _StoredTensor((rows, groups), FLOATS),
                "weight_shape": _StoredTensor((2,), ("I64", "I32")),
            }
            if scheme.has_zeros:
                parts["weight_zero_point"] = _StoredTensor((row_words, groups), INT32)
            if scheme.is_ordered:
                parts["weight_g_idx"] = _StoredTensor((columns,), INT32)
            return parts
        case QuantLayout.Q4_0:
            return {"weight": _StoredTensor((rows, columns), ("Q4_0",))}
        case QuantLayout.INT8:
            return {"weight": _StoredTensor((rows, columns), INT8), "weight_scale": _StoredTensor((rows, 1), FLOATS)}
        case QuantLayout.FP8:
            return {
                "weight": _StoredTensor((rows, columns), FP8),
                "weight_scale": _StoredTensor((scheme.num_row_groups(rows), groups), FLOATS),
                # Scales of activations. They are ignored: scales are computed at run time.
                "input_scale": _StoredTensor((1, 1), FLOATS, False),
                "activation_scale": _StoredTensor((1, 1), FLOATS, False),
            }
        case QuantLayout.MXFP4:
            return {
                "blocks": _StoredTensor((rows, groups, scheme.group // 2), PAIRS),
                "scales": _StoredTensor((rows, groups), MX_SCALES),
            }
        case QuantLayout.NVFP4:
            return {
                "weight_packed": _StoredTensor((rows, -(-columns // 2)), PAIRS),
                "weight_scale": _StoredTensor((rows, groups), FP8),
                "weight_global_scale": _StoredTensor((1,), FLOATS),
                "input_global_scale": _StoredTensor((1,), FLOATS, False),  # is ignored
            }


def _match(
    name: str, want: _StoredTensor, entries: Mapping[str, TensorEntry], path: Path, stored_name: Callable[[str], str]
) -> TensorEntry | None:
    entry = entries.get(name)
    if entry is None:
        if want.is_needed:
            raise ModelError(
                f"{path}: tensor {stored_name(name)} is missing, and quantization_config in config.json calls "
                "for it: download the weights again"
            )
        return None
    if _without_ones(want.shape) != _without_ones(entry.shape):
        entry.check_shape(name, want.shape, "quantization_config in config.json")
    if entry.dtype not in want.dtypes:
        raise ModelError(
            f"{entry.file}: tensor {stored_name(name)} has dtype {entry.dtype}, and quantization_config in "
            f"config.json calls for {' or '.join(want.dtypes)}: config and weights belong to different models"
        )
    return entry


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dimensions of 1: tools differ in those of scales."""
    return tuple(size for size in shape if size != 1)
