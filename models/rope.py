"""Tables of cosines and sines for rotary embedding. Formulas and fp32 steps are transformers', so that angles agree to
the bit even at far positions."""

import math

import torch
from torch import Tensor

from penstock.models.spec import DefaultRope, LinearRope, Llama3Rope, Rope, YarnRope


def rope_tables(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (num_positions, head_dim / 2) in fp32, scaled by yarn's attention factor."""
    frequencies = inverse_frequencies(rope, head_dim)
    scale = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair, (head_dim / 2,) in fp32."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope:
        case DefaultRope():
            return 1.0 / powers
        case LinearRope():
            return 1.0 / powers / rope.factor
        case Llama3Rope():
            return _llama3(rope, 1.0 / powers)
        case YarnRope():
            return _yarn(rope, powers, head_dim)


def _llama3(rope: Llama3Rope, frequencies: Tensor) -> Tensor:
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / spread
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: YarnRope, powers: Tensor, head_dim: int) -> Tensor:
    def pair_of(rotations: float) -> float:
        """The pair that turns so many times over the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a slope
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
