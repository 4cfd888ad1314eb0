"""Latent attention in its absorbed form (see ``LatentAttention``), besides the attention itself."""

import torch
from torch import Tensor

from penstock.kernels.cuda.latent_kv import LatentShape, latent_kv
from penstock.kernels.cuda.norm import rms_norm
from penstock.models.backends.torch_common.weights import LatentProjections


def write_latents(
    shape: LatentShape,
    projections: LatentProjections,
    first: Tensor,
    rotation: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    query: Tensor,
    pages: Tensor,
) -> None:
    """Computes queries (T, H, ``cached_dim``) from the first linear's output (T, rows), and writes the cached vectors
    to their pages. ``rotation`` has the tables of ``rope_kv``."""
    cached, queries = first[:, : shape.cached_dim], first[:, shape.cached_dim :]
    if projections.query is not None and projections.query_norm is not None:
        normed = torch.empty_like(queries, memory_format=torch.contiguous_format)
        rms_norm(queries, projections.query_norm.weight, projections.query_norm.eps, normed)
        queries = projections.query(normed)
    latent_kv(shape, cached, queries, *rotation, positions, slots, projections.norm.weight, query, pages)
    unrotated = queries.view(len(queries), query.shape[1], -1)[..., shape.qk_rope_head_dim :]
    absorbed = query[..., shape.qk_rope_head_dim :]
    torch.bmm(unrotated.transpose(0, 1), projections.keys, out=absorbed.transpose(0, 1))


def expand_latents(projections: LatentProjections, mixed: Tensor) -> Tensor:
    """Computes the input of the output projection, (T, H * ``v_head_dim``), from weighted means of latents, (T, H,
    ``kv_lora_rank``)."""
    values = mixed.new_empty(*mixed.shape[:2], projections.values.shape[1])
    torch.bmm(mixed.transpose(0, 1), projections.values.transpose(1, 2), out=values.transpose(0, 1))
    return values.flatten(1)
