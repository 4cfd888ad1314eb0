"""Finds a model's tensors in checkpoints that have other names, or that combine several in one. Such a tensor is a part
of another, with an offset and perhaps strides or an order of rows of its own. Reads no tensor.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.models.architecture.rope import row_order
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.safetensors_header import ELEMENT_BITS, TensorEntry
from penstock.models.checkpoint.tensor_layouts import NAMINGS, WRAPPED, Naming, Wholes
from penstock.models.errors import ModelError

LAYER = re.compile(r"(model\.layers\.(\d+)\.)(.+)")
DERIVED_TENSORS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Endings of tensors that old checkpoints contain although they follow from the config."""
KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.([kv]_proj\.)?(k|v|kv|output)_(scale|zero_point)")
"""Names of the scales of a quantised KV cache, by various tools."""
OF_KV = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
"""Beginnings of the names of tensors that only compute keys and values."""
_FLOATS = ("F64", "F32", "F16", "BF16")


def find_views(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint under the names of ``spec.tensors()``. Unknown tensors are unchanged. Raises
    ModelError if a tensor cannot be split, or appears twice.
    """
    naming = NAMINGS.get(spec.architecture, Naming())
    wholes = naming.wholes(spec)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        layer = LAYER.fullmatch(name)
        if naming.has_draft_layers and layer is not None and int(layer[2]) >= spec.num_layers:
            continue
        if layer is not None and _is_unused(spec, int(layer[2]), layer[3]):
            continue
        for view_name, view in _views(name, entry, wholes, naming):
            if view_name in found:
                raise ModelError(
                    f"{entry.file}: tensor {view_name} comes twice, the second time out of {name}: download the "
                    "model's weights again"
                )
            # Quantised weights are put in order when they are read.
            rows = row_order(spec, view_name.rpartition(".")[0]) if view.dtype in _FLOATS else None
            found[view_name] = view if rows is None else replace(view, rows=rows)
    return found


def _is_unused(spec: ModelSpec, layer: int, local: str) -> bool:
    """Whether a layer's tensor is for keys and values that it takes from another one. Published checkpoints have such
    tensors."""
    return layer < spec.num_layers and not spec.has_kv(layer) and OF_KV.match(local) is not None


def rename_prefixes(architecture: str, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors with the beginnings of names that ``ModelSpec.tensors`` has."""
    prefixes = NAMINGS.get(architecture, Naming()).prefixes
    found = {}
    for name, entry in entries.items():
        old, new = next(((old, new) for old, new in prefixes if name.startswith(old)), ("", ""))
        found[new + name.removeprefix(old)] = entry
    return found


def find_text_model(entries: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], int]:
    """Returns the tensors of the language model in a checkpoint that also contains a vision tower, under the names that
    they would have without it, and the number of all others."""
    found = {}
    for name, entry in entries.items():
        for old, new in WRAPPED:
            if name.startswith(old):
                found[new + name.removeprefix(old)] = entry
                break
    return found, len(entries) - len(found)


def without_kv_scales(entries: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], str]:
    """Returns the tensors without scales of the KV cache, and a line for the log if there are any."""
    kept = {name: entry for name, entry in entries.items() if not KV_SCALE.fullmatch(name)}
    count = len(entries) - len(kept)
    text = (
        f"its {count} scales of quantised keys and values are not used: the KV cache has the type of the activations "
        "unless --kv-cache-dtype changes it"
    )
    return kept, text if count else ""


def stored_name(spec: ModelSpec, name: str) -> str:
    """Returns the name of the tensor that combines the one of this name with others, or the name itself."""
    match = LAYER.fullmatch(name)
    if match is not None:
        prefix, _, local = match.groups()
        for whole, layout in NAMINGS.get(spec.architecture, Naming()).wholes(spec).items():
            if any(part.name == local for part in layout.parts):
                return prefix + whole
    return name


def _views(name: str, entry: TensorEntry, wholes: Wholes, naming: Naming) -> Iterator[tuple[str, TensorEntry]]:
    match = LAYER.fullmatch(name)
    if match is None:
        yield name, entry
        return
    prefix, _, local = match.groups()
    whole = wholes.get(local)
    if whole is None:
        linear, _, part = local.rpartition(".")
        if part != "bias" and f"{linear}.weight" in wholes:
            raise ModelError(
                f"{entry.file}: tensor {name} combines several matrices, quantised as one, which is not "
                "supported: use the unquantised checkpoint, with --quantization int8 or int4"
            )
        for pattern, replacement in naming.renamed:
            local, changes = re.subn(f"^{pattern}", replacement, local)
            if changes:
                break
        yield prefix + local, entry
        return
    if whole.turned is not None and entry.shape == whole.turned.shape != whole.shape:
        whole = whole.turned
    entry.check_shape(name, whole.shape, "config.json")
    bits = ELEMENT_BITS[entry.dtype]
    for part in whole.parts:
        offset = entry.offset + part.offset * bits // 8
        num_bytes = (math.prod(part.shape) * bits + 7) // 8
        yield (
            prefix + part.name,
            TensorEntry(entry.file, entry.dtype, part.shape, offset, num_bytes, part.strides, part.rows),
        )
