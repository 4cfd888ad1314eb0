"""Latent attention in its absorbed form (see ``LatentAttention``), in plain torch."""

import torch
from torch import Tensor

from penstock.kernels.reference.ops import rotate
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.reference.attention_groups import AttentionGroup, grouped_attention
from penstock.models.backends.torch_common.kv_pages import KVPages
from penstock.models.backends.torch_common.weights import LatentProjections, LayerWeights


def attend_to_latents(
    spec: ModelSpec,
    pages: KVPages,
    index: int,
    layer: LayerWeights,
    projections: LatentProjections,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    slots: Tensor,
    groups: list[AttentionGroup],
) -> Tensor:
    """Computes one layer's attention and output projection, (T, hidden) -> (T, hidden). Writes the cached vector of
    every token."""
    rotary_dim = spec.rotary_dim
    cached, queries = layer.qkv(x).tensor_split([spec.head_dim], dim=1)
    cached = torch.cat((cached[:, :rotary_dim], projections.norm(cached[:, rotary_dim:])), dim=1)
    if projections.query is not None and projections.query_norm is not None:
        queries = projections.query(projections.query_norm(queries))
    queries = queries.view(len(x), spec.num_heads, -1)
    absorbed = torch.einsum("thn,hnr->thr", queries[..., rotary_dim:], projections.keys)
    queries = torch.cat((queries[..., :rotary_dim], absorbed), dim=2)
    heads = rotate(torch.cat((queries, cached.unsqueeze(1)), dim=1), *rotation)
    queries, key = heads[:, : spec.num_heads], heads[:, spec.num_heads :]
    pages.write(index, slots, key, key)
    mixed = grouped_attention(pages, index, queries, groups, scale=spec.attention_scale, cap=None, sinks=None)
    values = torch.einsum("thr,hvr->thv", mixed[..., rotary_dim:], projections.values)
    return layer.output(values.flatten(1))
