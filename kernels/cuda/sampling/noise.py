"""Noise that is a pure function of (seed, position, token id). Up to the logarithms, which are in float64, it is
bitwise that of ``kernels/reference/sampling.py``."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, the increment of SplitMix64."""
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
RANGE = tl.constexpr(4294967297.0)
"""2^32 + 1."""


@triton.jit
def mix64(x):
    """SplitMix64's finaliser, a bijection of 64 bits (Steele, Lea, Flood 2014); uint64 in and out."""
    x = (x ^ (x >> 30)) * tl.full([], MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], MIX_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def noise_stream(seed, position):
    """The state from which a row's noise is drawn at a position. Takes int64, returns uint64."""
    return mix64(mix64(seed.to(tl.uint64)) + position.to(tl.uint64) * tl.full([], GOLDEN, tl.uint64))


@triton.jit
def gumbel(stream, token_ids):
    """-ln(-ln u), u = (h + 1) / (2^32 + 1), where h is the upper half of mix(stream + (id + 1) G); float64."""
    state = stream + (token_ids.to(tl.uint64) + 1) * tl.full([], GOLDEN, tl.uint64)
    upper = (mix64(state) >> 32).to(tl.float64)
    return -tl.log(-tl.log((upper + 1.0) / tl.full([], RANGE, tl.float64)))
