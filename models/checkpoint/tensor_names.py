"""Finds a model's tensors in checkpoints that have other names, or that combine several in one. Such a tensor is a part
of another, with an offset and perhaps strides of its own. Reads no tensor.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.models.checkpoint.files.safetensors_header import ELEMENT_BITS, TensorEntry
from penstock.models.checkpoint.spec import Experts, ModelSpec
from penstock.models.errors import ModelError

LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")

RENAMED: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "MixtralForCausalLM": (
        (re.compile(r"block_sparse_moe\.gate\."), "mlp.gate."),
        (re.compile(r"block_sparse_moe\.experts\.(\d+)\.w1\."), r"mlp.experts.\1.gate_proj."),
        (re.compile(r"block_sparse_moe\.experts\.(\d+)\.w2\."), r"mlp.experts.\1.down_proj."),
        (re.compile(r"block_sparse_moe\.experts\.(\d+)\.w3\."), r"mlp.experts.\1.up_proj."),
    ),
    "GptOssForCausalLM": ((re.compile(r"mlp\.router\."), "mlp.gate."),),
}
"""The names of a layer's tensors by architecture: in checkpoints, and in ``ModelSpec.tensors``."""


@dataclass(frozen=True)
class _Part:
    """A tensor inside another."""

    name: str
    offset: int
    """The offset of its first element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class _Whole:
    """A tensor that contains others."""

    shape: tuple[int, ...]
    parts: tuple[_Part, ...]


Wholes = Mapping[str, _Whole]
"""The combined tensors of a layer, by name."""


def find_views(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint under the names of ``spec.tensors()``. Unknown tensors are unchanged. Raises
    ModelError if a tensor cannot be split, or appears twice.
    """
    wholes = WHOLES[spec.architecture](spec) if spec.architecture in WHOLES else {}
    renamed = RENAMED.get(spec.architecture, ())
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        for view_name, view in _views(name, entry, wholes, renamed):
            if view_name in found:
                raise ModelError(
                    f"{entry.file}: tensor {view_name} comes twice, the second time out of {name}: download the "
                    "model's weights again"
                )
            found[view_name] = view
    return found


def _views(
    name: str, entry: TensorEntry, wholes: Wholes, renamed: tuple[tuple[re.Pattern[str], str], ...]
) -> Iterator[tuple[str, TensorEntry]]:
    match = LAYER.fullmatch(name)
    if match is None:
        yield name, entry
        return
    prefix, local = match.groups()
    whole = wholes.get(local)
    if whole is None:
        if f"{local.rpartition('.')[0]}.weight" in wholes:
            raise ModelError(
                f"{entry.file}: tensor {name} combines several matrices, quantised as one, which is not "
                "supported: use the unquantised checkpoint, with --quantization int8 or int4"
            )
        for pattern, replacement in renamed:
            local = pattern.sub(replacement, local)
        yield prefix + local, entry
        return
    if entry.shape != whole.shape:
        raise ModelError(
            f"{entry.file}: tensor {name} has the shape {list(entry.shape)}, and config.json calls for "
            f"{list(whole.shape)}: config and weights belong to different models"
        )
    bits = ELEMENT_BITS[entry.dtype]
    for part in whole.parts:
        offset = entry.offset + part.offset * bits // 8
        num_bytes = (math.prod(part.shape) * bits + 7) // 8
        yield prefix + part.name, TensorEntry(entry.file, entry.dtype, part.shape, offset, num_bytes, part.strides)


def _stacked(columns: int, rows: Mapping[str, int]) -> _Whole:
    """Matrices with these numbers of rows, one above the other."""
    parts, above = [], 0
    for name, count in rows.items():
        parts.append(_Part(name, above * columns, (count, columns)))
        above += count
    return _Whole((above, columns), tuple(parts))


def _phi3(spec: ModelSpec) -> Wholes:
    """One matrix for queries, keys and values; one for gate and up."""
    qkv = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    inner = spec.intermediate_size
    return {
        "self_attn.qkv_proj.weight": _stacked(
            spec.hidden_size, {f"self_attn.{name}.weight": rows for name, rows in qkv.items()}
        ),
        "mlp.gate_up_proj.weight": _stacked(
            spec.hidden_size, {"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}
        ),
    }


def _fused_experts(spec: ModelSpec) -> Wholes:
    """The experts' layout in transformers 5, which it also saves unless it writes the original format: (experts, 2
    inner, hidden) with gate above up, and (experts, hidden, inner).
    """
    experts = _experts(spec)
    num, inner, hidden = experts.num_experts, experts.intermediate_size, spec.hidden_size
    size = inner * hidden
    gate_up = [
        _Part(f"mlp.experts.{expert}.{name}.weight", (2 * expert + half) * size, (inner, hidden))
        for expert in range(num)
        for half, name in enumerate(("gate_proj", "up_proj"))
    ]
    down = [_Part(f"mlp.experts.{expert}.down_proj.weight", expert * size, (hidden, inner)) for expert in range(num)]
    return {
        "mlp.experts.gate_up_proj": _Whole((num, 2 * inner, hidden), tuple(gate_up)),
        "mlp.experts.down_proj": _Whole((num, hidden, inner), tuple(down)),
    }


def _gpt_oss(spec: ModelSpec) -> Wholes:
    """gpt-oss's layout: experts' matrices are (in, out), and the columns of gate and up alternate."""
    experts = _experts(spec)
    num, inner, hidden = experts.num_experts, experts.intermediate_size, spec.hidden_size
    gate_up, gate_up_bias, down, down_bias = [], [], [], []
    for expert in range(num):
        prefix = f"mlp.experts.{expert}."
        for half, name in enumerate(("gate_proj", "up_proj")):
            first = expert * hidden * 2 * inner + half
            gate_up.append(_Part(f"{prefix}{name}.weight", first, (inner, hidden), (2, 2 * inner)))
            gate_up_bias.append(_Part(f"{prefix}{name}.bias", expert * 2 * inner + half, (inner,), (2,)))
        down.append(_Part(f"{prefix}down_proj.weight", expert * inner * hidden, (hidden, inner), (1, hidden)))
        down_bias.append(_Part(f"{prefix}down_proj.bias", expert * hidden, (hidden,)))
    return {
        "mlp.experts.gate_up_proj": _Whole((num, hidden, 2 * inner), tuple(gate_up)),
        "mlp.experts.gate_up_proj_bias": _Whole((num, 2 * inner), tuple(gate_up_bias)),
        "mlp.experts.down_proj": _Whole((num, inner, hidden), tuple(down)),
        "mlp.experts.down_proj_bias": _Whole((num, hidden), tuple(down_bias)),
    }


def _experts(spec: ModelSpec) -> Experts:
    assert spec.experts is not None, spec.architecture
    return spec.experts


WHOLES: dict[str, Callable[[ModelSpec], Wholes]] = {
    "GptOssForCausalLM": _gpt_oss,
    "MixtralForCausalLM": _fused_experts,
    "Phi3ForCausalLM": _phi3,
    "Qwen3MoeForCausalLM": _fused_experts,
}
