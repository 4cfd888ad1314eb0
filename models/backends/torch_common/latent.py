"""Loads what latent attention needs besides ordinary linears, for backends in torch."""

from typing import Protocol

from torch import Tensor

from penstock.models.architecture.spec_parts import LATENT_NORM_EPS, LatentAttention
from penstock.models.backends.torch_common.weights import LatentProjections, Linear, RmsNorm


class WeightReader(Protocol):
    """Reads a model's tensors onto the device."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor in the model's dtype."""

    def norm_part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a norm's tensor, in at least fp32."""

    def whole(self, name: str, rows: int, columns: int) -> Linear:
        """Returns a linear without a bias."""


def load_latent(latent: LatentAttention, num_heads: int, prefix: str, reader: WeightReader) -> LatentProjections:
    """Loads a layer's projections. ``prefix`` begins the names of its attention's tensors."""

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(reader.norm_part(f"{prefix}{name}.weight", (size,)), LATENT_NORM_EPS)

    query_norm, query = None, None
    if latent.q_lora_rank is not None:
        query_norm = norm("q_a_layernorm", latent.q_lora_rank)
        query = reader.whole(f"{prefix}q_b_proj", num_heads * latent.qk_head_dim, latent.q_lora_rank)
    keys, values = _of_heads(latent, num_heads, prefix, reader)
    return LatentProjections(query_norm, query, norm("kv_a_layernorm", latent.kv_lora_rank), keys, values)


def _of_heads(latent: LatentAttention, num_heads: int, prefix: str, reader: WeightReader) -> tuple[Tensor, Tensor]:
    """Returns the matrices of keys and of values of all heads, (H, rows, rank)."""
    nope, size, rank = latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank
    if latent.splits_kv:
        keys = reader.tensor(f"{prefix}k_b_proj.weight", (num_heads * rank, nope)).view(num_heads, rank, nope)
        values = reader.tensor(f"{prefix}v_b_proj.weight", (num_heads * size, rank)).view(num_heads, size, rank)
        return keys.transpose(1, 2), values
    weight = reader.tensor(f"{prefix}kv_b_proj.weight", (num_heads * (nope + size), rank))
    heads = weight.view(num_heads, nope + size, rank)
    return heads[:, :nope], heads[:, nope:]
