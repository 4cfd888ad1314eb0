"""Packs latent attention for the CPU library; ``Latent`` in ``csrc/model/program.h`` describes what it computes."""

import ctypes
from collections.abc import Iterable, Iterator

from penstock.kernels.cpu.bindings import LANES, Kernels, Matrix, StorageFormat
from penstock.kernels.cpu.program import DecoderLayer
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import LATENT_NORM_EPS, LatentAttention
from penstock.models.backends.cpu.weights import ALIGNMENT, Packer, Rows, group_made

KV_B, K_B, V_B = "kv_b_proj.weight", "k_b_proj.weight", "v_b_proj.weight"
MAX_GROUP = 32
"""The limit of query heads that attend to latents together: more would not fit into a core's cache."""


def num_kv_groups(spec: ModelSpec) -> int:
    """Returns the number of groups of query heads whose attention is computed together: that of KV heads. The query
    heads of latent attention, which all attend to the same vectors, are divided equally, so that several threads have
    work."""
    if spec.latent is None:
        return spec.num_kv_heads
    group = max(size for size in range(1, MAX_GROUP + 1) if spec.num_heads % size == 0)
    return spec.num_heads // group


def kv_b_bytes(spec: ModelSpec, latent: LatentAttention, format: StorageFormat, kernels: Kernels) -> int:
    """Returns the size of a layer's packed ``kv_b_proj``, the matrices of its heads."""
    group = group_made(format)
    shapes = ((latent.kv_lora_rank, latent.qk_nope_head_dim), (latent.v_head_dim, latent.kv_lora_rank))
    sizes = (-(-rows // LANES) * int(kernels.panel_bytes(format, columns, group)) for rows, columns in shapes)
    return spec.num_heads * sum(size + ALIGNMENT for size in sizes)


def add_latent(
    packer: Packer, spec: ModelSpec, latent: LatentAttention, prefix: str, layer: DecoderLayer, kept: list[object]
) -> None:
    """Packs what a layer's attention has besides its first linears and the output projection. ``prefix`` begins the
    names of its tensors; ``kept`` gets what has to live as long as the layer."""
    num_heads, nope, rank = spec.num_heads, latent.qk_nope_head_dim, latent.kv_lora_rank
    to = layer.latent
    to.rank, to.rotary, to.unrotated, to.value_size = rank, latent.qk_rope_head_dim, nope, latent.v_head_dim
    to.norm_eps = LATENT_NORM_EPS
    to.norm = packer.vector(f"{prefix}kv_a_layernorm.weight", rank)
    if latent.q_lora_rank is not None:
        to.query_norm = packer.vector(f"{prefix}q_a_layernorm.weight", latent.q_lora_rank)
        rows = num_heads * latent.qk_head_dim
        to.query = packer.linear([f"{prefix}q_b_proj"], [rows], latent.q_lora_rank, False)
    keys, values = _of_heads(packer, latent, num_heads, prefix)

    def packed(parts: Iterable[Rows]) -> int:
        matrices = [packer.float_matrix([part], part.array.shape[1], [None], False, packer.format) for part in parts]
        array = (Matrix * num_heads)(*matrices)
        kept.append(array)
        return ctypes.addressof(array)

    to.absorb = packed(keys)
    to.expand = packed(values)


def _of_heads(
    packer: Packer, latent: LatentAttention, num_heads: int, prefix: str
) -> tuple[Iterator[Rows], Iterator[Rows]]:
    """Returns each head's matrix of keys, (rank, rows), and its matrix of values, (rows, rank)."""
    nope, size, rank = latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank

    def divided(name: str, rows: int, columns: int) -> Iterator[Rows]:
        whole = packer.tensors.rows(prefix + name, (num_heads * rows, columns))
        for begin in range(0, num_heads * rows, rows):
            yield Rows(whole.array[begin : begin + rows], whole.source)

    if latent.splits_kv:
        return divided(K_B, rank, nope), divided(V_B, size, rank)
    heads = list(divided(KV_B, nope + size, rank))
    keys = (Rows(head.array[:nope].T, head.source) for head in heads)
    return keys, (Rows(head.array[nope:], head.source) for head in heads)
