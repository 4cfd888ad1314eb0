"""Frequencies of rotary embedding, in numpy, so that a worker without torch can compute them.

Formulas and the order of float32 operations are transformers'. Powers are computed in float64 and rounded: torch's
float32 power equals that value except in about one case of a hundred, where it is off by the last bit. Which cases
differ depends on the CPU's instruction set.
"""

import math

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import (
    DefaultRope,
    LatentAttention,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    ProportionalRope,
    QkNorm,
    Rope,
    YarnRope,
)

Floats = NDArray[np.float32]


def row_order(spec: ModelSpec, module: str) -> NDArray[np.int64] | None:
    """Returns the order in which a backend gets the rows of a module, by its name, where the checkpoint rotates
    neighbouring dimensions: in each head first the even ones, then the odd ones. For norms of queries and keys, the
    order is that of the weight's entries, in the weight's shape. With latent attention, the rotated part of a head
    comes first. None for other modules."""
    name = module.rpartition(".self_attn.")[2]
    if spec.latent is not None:
        return _latent_row_order(spec, spec.latent, name)
    if not spec.interleaved_rope or name not in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return None
    dims, rotated = np.arange(spec.head_dim), spec.rotary_dim
    order = np.concatenate((dims[:rotated:2], dims[1:rotated:2], dims[rotated:]))
    is_query, is_norm = name.startswith("q"), name.endswith("norm")
    heads = 1 if is_norm and spec.qk_norm is QkNorm.HEAD else spec.num_heads if is_query else spec.num_kv_heads
    whole: NDArray[np.int64] = np.arange(heads)[:, None] * spec.head_dim + order
    return whole.reshape(spec.qk_norm_shapes[0 if is_query else 1] if is_norm else -1)


def _latent_row_order(spec: ModelSpec, latent: LatentAttention, name: str) -> NDArray[np.int64] | None:
    rotated, rest = np.arange(latent.qk_rope_head_dim), np.arange(latent.qk_nope_head_dim)
    if spec.interleaved_rope:
        rotated = np.concatenate((rotated[::2], rotated[1::2]))
    if name == "kv_a_proj_with_mqa":
        return np.concatenate((latent.kv_lora_rank + rotated, np.arange(latent.kv_lora_rank)))
    if name not in ("q_proj", "q_b_proj"):
        return None
    heads = np.arange(spec.num_heads)[:, None] * latent.qk_head_dim
    order: NDArray[np.int64] = heads + np.concatenate((latent.qk_nope_head_dim + rotated, rest))
    return order.reshape(-1)


def attention_factor(rope: Rope) -> float:
    """The factor of cosines and sines."""
    return rope.attention_factor if isinstance(rope, YarnRope | LongRope) else 1.0


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Floats:
    """The angle per position of each pair, (rotary_dim / 2,) in float32."""
    if isinstance(rope, NoRope):
        return np.zeros(rotary_dim // 2, dtype=np.float32)
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    match rope:
        case DefaultRope():
            return 1.0 / powers
        case LinearRope():
            return 1.0 / powers / np.float32(rope.factor)
        case Llama3Rope():
            return _llama3(rope, 1.0 / powers)
        case YarnRope():
            return _yarn(rope, powers, rotary_dim)
        case ProportionalRope():
            turned = np.arange(rotary_dim // 2) < int(rope.part * rotary_dim // 2)
            return np.where(turned, 1.0 / powers / np.float32(rope.factor), np.zeros_like(powers))
        case LongRope():
            return 1.0 / (np.array(rope.factors, dtype=np.float32) * powers)


def _llama3(rope: Llama3Rope, frequencies: Floats) -> Floats:
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    # Written as a product with the reciprocal, which is how torch divides a number by a tensor.
    wavelengths = 1.0 / frequencies * np.float32(2 * math.pi)
    scaled = np.where(wavelengths > longest, frequencies / np.float32(rope.factor), frequencies)
    spread = rope.high_freq_factor - rope.low_freq_factor
    if spread == 0:
        return scaled
    rotations = 1.0 / wavelengths * np.float32(rope.original_max_positions)
    smooth = (rotations - np.float32(rope.low_freq_factor)) / np.float32(spread)
    blended = (1 - smooth) * scaled / np.float32(rope.factor) + smooth * scaled
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return np.where(between, blended, scaled)


def _yarn(rope: YarnRope, powers: Floats, rotary_dim: int) -> Floats:
    def pair_of(rotations: float) -> float:
        """The pair that makes this many turns over the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp must have a slope
    pairs = np.arange(rotary_dim // 2, dtype=np.float32)
    ramp = ((pairs - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    kept = 1 - ramp
    blended: Floats = 1.0 / (np.float32(rope.factor) * powers) * (1 - kept) + 1.0 / powers * kept
    return blended
