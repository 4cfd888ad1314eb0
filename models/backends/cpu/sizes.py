"""The formats of a model on the CPU, and the bytes that its weights and KV pages take in them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.kernels.cpu.bindings import LANES, Kernels, KvLayout, StorageFormat
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cpu.latent import K_B, KV_B, V_B, kv_b_bytes, num_kv_groups
from penstock.models.backends.cpu.weights import ALIGNMENT, group_made, is_kept, stored_format
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.checkpoint.quantization.layout import QuantizedLinear

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
LAYER_PROJECTION = "model.per_layer_model_projection"
HEAD = "lm_head.weight"
ROUTER = "mlp.gate"
SHARED_GATE = "mlp.shared_expert_gate"

ELEMENT_BYTES = {StorageFormat.F32: 4, StorageFormat.BF16: 2, StorageFormat.INT8: 1, StorageFormat.INT4: 1}
"""The largest size of a weight."""


@dataclass(frozen=True)
class StorageFormats:
    """The formats that a model is held in."""

    weights: StorageFormat
    """The format of the layers' products."""
    head: StorageFormat
    table: StorageFormat
    """The format of an embedding that is not the head's matrix: F32 or BF16."""
    kv: StorageFormat


def kv_layouts(spec: ModelSpec, format: StorageFormat, part: ModelPart) -> list[tuple[KvLayout, int]]:
    """Returns the layout of each layer's page, drawn in ``csrc/core/kernel_table.h``, and its offset from the page of
    the part's first layer. A layer without keys of its own has the page of another one. All layers' pages of the same
    tokens are adjacent, so that fresh memory is first used evenly over time, not for all layers at once."""
    scales = 2 * LANES * 4 if format is StorageFormat.INT8 else 0
    sections = 2 if spec.latent is None else 1
    specs = {layer: spec.at(layer) for layer in part.layers}
    heads = {
        layer: sections * (-(-sizes.head_dim // LANES) * LANES) * LANES * ELEMENT_BYTES[format] + scales
        for layer, sizes in specs.items()
    }
    offsets: dict[int, int] = {}
    page_bytes = 0
    for layer, sizes in specs.items():
        offsets[layer] = page_bytes if spec.kv_sources[layer] == layer else offsets[spec.kv_sources[layer]]
        page_bytes += sizes.num_kv_heads * heads[layer] if spec.has_kv(layer) else 0
    return [
        (
            KvLayout(format, num_kv_groups(sizes), sizes.head_dim, heads[layer], page_bytes, sections == 1),
            offsets[layer],
        )
        for layer, sizes in specs.items()
    ]


def block_bytes(spec: ModelSpec, format: StorageFormat, block_size: int, part: ModelPart | None = None) -> int:
    """Returns the size of a block of ``block_size`` tokens, a multiple of 16, in all layers of a part."""
    (layout, _), *_ = kv_layouts(spec, format, part or ModelPart.whole(spec))
    return int(layout.page_bytes) * (block_size // LANES)


def max_weight_bytes(
    spec: ModelSpec,
    formats: StorageFormats,
    quantized: Mapping[str, QuantizedLinear],
    kernels: Kernels,
    part: ModelPart | None = None,
) -> int:
    """Returns the most that the packed weights of a part need. They need little less: joining linears saves a panel at
    most."""
    total = 0
    for name, shape in spec.tensors():
        if part is not None and not part.has(name):
            continue
        if len(shape) != 2:
            total += 4 * math.prod(shape)
        elif name == LAYER_EMBEDDING or (name == EMBEDDING and not spec.tied_embeddings):
            total += math.prod(shape) * ELEMENT_BYTES[formats.table]
        elif spec.latent is not None and name.endswith(K_B):
            continue  # counted with the values
        elif spec.latent is not None and name.endswith((KV_B, V_B)):
            total += kv_b_bytes(spec, spec.latent, formats.weights, kernels)
        elif name == POSITIONS:
            total += math.prod(shape) * 4
        else:
            rows, columns = shape
            kind = formats.head if name in (EMBEDDING, HEAD) else formats.weights
            is_float = name.endswith((f"{ROUTER}.weight", f"{SHARED_GATE}.weight", "_norm.weight"))
            kind, group = (StorageFormat.F32, 0) if is_float else (kind, group_made(kind))
            linear = quantized.get(name.removesuffix(".weight"))
            if linear is not None and is_kept(linear.scheme):
                kind, group = stored_format(linear.scheme, columns)
            total += -(-rows // LANES) * int(kernels.panel_bytes(kind, columns, group))
        total += ALIGNMENT
    return total
