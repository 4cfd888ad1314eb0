"""The cosines and sines of rotary embeddings as tensors, and factors of queries, for backends in torch."""

import torch
from torch import Tensor

from penstock.models.architecture.rope import attention_factor, inverse_frequencies
from penstock.models.architecture.spec_parts import QueryScaling, Rope


def cos_sin_tables(rope: Rope, rotary_dim: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each (num_positions, rotary_dim / 2) in fp32."""
    frequencies = torch.from_numpy(inverse_frequencies(rope, rotary_dim))
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    scale = attention_factor(rope)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def query_scales(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Returns the factor of the queries at each of the positions (T,), in fp32."""
    return 1 + scaling.beta * torch.log1p(torch.floor((positions + scaling.shift) / scaling.original_max_positions))
