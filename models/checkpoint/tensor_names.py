"""Finds a model's tensors in checkpoints that have other names, or that combine several in one. Such a tensor is a part
of another, with an offset and perhaps strides or an order of rows of its own. Reads no tensor.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from penstock.models.architecture.rope import row_order
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.combined_tensors import Naming, Wholes
from penstock.models.checkpoint.files.safetensors_header import ELEMENT_BITS, TensorEntry
from penstock.models.checkpoint.tensor_layouts import WRAPPED, naming_of
from penstock.models.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"(model\.layers\.(\d+)\.)(.+)")
DERIVED_TENSORS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")
"""Endings of tensors that old checkpoints contain although they follow from the config."""
_KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv]|qkv)_proj\.)?(k|v|kv|output)_(scale|zero_point)")
"""Names of the scales of a quantised KV cache, by various tools."""
OF_KV = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
"""Beginnings of the names of tensors that only compute keys and values."""
_FLOATS = ("F64", "F32", "F16", "BF16")


def find_views(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of a checkpoint under the names of ``spec.tensors()``. Unknown tensors are unchanged. Raises
    ModelError if a tensor cannot be split, or appears twice.
    """
    naming = naming_of(spec.architecture)
    wholes = naming.wholes(spec)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        layer = LAYER.fullmatch(name)
        if layer is not None:
            number = _decoder_layer(spec, int(layer[2]))
            if number is None or (naming.has_draft_layers and number >= spec.num_layers):
                continue
            if _is_unused(spec, number, layer[3]):
                continue
            name = f"model.layers.{number}.{layer[3]}"
        elif naming.image_rows and name == EMBEDDING:
            entry = _without_last_rows(name, entry, spec, naming.image_rows)
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


def _decoder_layer(spec: ModelSpec, layer: int) -> int | None:
    """Returns the decoder's number of one of the checkpoint's layers; None if it is not part of the decoder."""
    if layer in spec.left_out_layers:
        return None
    return layer - sum(left_out < layer for left_out in spec.left_out_layers)


def _stored_layer(spec: ModelSpec, layer: int) -> int:
    """Returns the checkpoint's number of one of the decoder's layers."""
    for left_out in spec.left_out_layers:  # ascending
        layer += left_out <= layer
    return layer


def _is_unused(spec: ModelSpec, layer: int, local: str) -> bool:
    """Whether a layer's tensor is for keys and values that it takes from another one. Published checkpoints have such
    tensors."""
    return layer < spec.num_layers and not spec.has_kv(layer) and OF_KV.match(local) is not None


def _without_last_rows(name: str, entry: TensorEntry, spec: ModelSpec, count: int) -> TensorEntry:
    """Returns the embedding without its last ``count`` rows, which text does not use. Raises ModelError if it has
    another shape."""
    rows, columns = spec.vocab_size, spec.hidden_size
    entry.check_shape(name, (rows + count, columns), "config.json")
    return replace(entry, shape=(rows, columns), num_bytes=rows * columns * ELEMENT_BITS[entry.dtype] // 8)


def rename_prefixes(architecture: str, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors with the beginnings of names that ``ModelSpec.tensors`` has."""
    naming = naming_of(architecture)
    found = {}
    for name, entry in entries.items():
        if name.startswith(naming.left_out):
            continue
        old, new = next(((old, new) for old, new in naming.prefixes if name.startswith(old)), ("", ""))
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


def find_kv_scales(
    spec: ModelSpec, entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Returns the tensors without those of a quantised KV cache, and its scales under the names that llm-compressor
    gives them: ``model.layers.0.self_attn.k_scale`` and ``v_scale``. Zero points are dropped: without them, keys and
    values divided by their scales fit into fp8 too. Raises ModelError if a scale has a wrong shape or dtype.
    """
    kept: dict[str, TensorEntry] = {}
    scales: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        match = _KV_SCALE.fullmatch(name)
        if match is None:
            kept[name] = entry
            continue
        number, module, kind, part = match.groups()
        layer = _decoder_layer(spec, int(number))
        if part == "zero_point" or layer is None or layer >= spec.num_layers:
            continue
        num_heads = spec.at(layer).num_kv_heads
        if math.prod(entry.shape) not in (1, num_heads):
            entry.check_shape(name, (num_heads,), "config.json")
        if entry.dtype not in _FLOATS:
            raise ModelError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}: scales must be {', '.join(_FLOATS)}; download "
                "the model's weights again"
            )
        # An output's scale is that of its module, and some tools have one scale for keys and values.
        of = module or "" if kind == "output" else kind
        scales |= {f"model.layers.{layer}.self_attn.{letter}_scale": entry for letter in "kv" if letter in of}
    return kept, scales


def stored_name(spec: ModelSpec, name: str) -> str:
    """Returns the checkpoint's name of a tensor, or of the one that combines it with others."""
    match = LAYER.fullmatch(name)
    if match is not None:
        number, local = _stored_layer(spec, int(match[2])), match[3]
        for whole, layout in naming_of(spec.architecture).wholes(spec).items():
            if any(part.name == local for part in layout.parts):
                return f"model.layers.{number}.{whole}"
        return f"model.layers.{number}.{local}"
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
