"""What a mixture of experts is compiled for, and the sizes of its tiles. A *pair* is a token with one of its experts;
a *tile* is up to ``block_m`` pairs of one expert, whose products are made together."""

from dataclasses import dataclass

import torch
import triton

from penstock.kernels.cuda.model_shapes import Mixture, ModelShape


@dataclass(frozen=True)
class MoeTiles:
    """Of one of the two products, for Hopper's shared memory and registers."""

    block_n: int
    """Columns of the result that a program makes."""
    block_k: int
    """Elements of a row that are read together, in 16 bits."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertsTiles:
    """Of both products."""

    block_m: int
    """Pairs of a tile, at most."""
    max_pairs: float
    """Made for so many pairs of an expert, on average, at most."""
    gate_up: MoeTiles
    down: MoeTiles


DECODE = ExpertsTiles(16, 8, MoeTiles(32, 128, 4, 5), MoeTiles(32, 128, 4, 6))
"""Bound by reading weights: of few, small programs to an expert, so that one token's experts keep the whole GPU busy,
and with much under way."""
MIDDLE = ExpertsTiles(64, 64, MoeTiles(64, 64, 4, 4), MoeTiles(128, 64, 4, 4))
"""As small as Hopper's matrix units take, which still outrun the reading of weights."""
PREFILL = ExpertsTiles(128, float("inf"), MoeTiles(128, 64, 8, 4), MoeTiles(256, 64, 8, 4))
"""Bound by products: as large as registers allow, to read as little as possible for each."""


@dataclass(frozen=True)
class ExpertsShape:
    """How the experts of a model's layers are compiled."""

    mixture: Mixture
    hidden_size: int
    intermediate_size: int
    """Of an expert."""
    dtype: torch.dtype
    logits_dtype: torch.dtype
    """Of the router's logits."""
    activation: str = "silu"
    """silu, gelu or gelu_tanh."""
    clamped_gate: tuple[float, float] | None = None
    """Alpha and limit of the gate that stands in the place of the activation."""
    deterministic: bool = False
    """Whether a token's result is the same bits in every batch: tiles of other sizes are multiplied by other
    instructions, so that all steps take those of ``MIDDLE``."""

    def __post_init__(self) -> None:
        """Our own bugs."""
        assert 1 <= self.mixture.per_token <= self.mixture.num_experts
        assert self.dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert self.logits_dtype in (torch.float32, self.dtype)

    @classmethod
    def of(cls, shape: ModelShape) -> "ExpertsShape":
        """That of a model that has experts, and a router of the same dtype."""
        assert shape.experts is not None
        return cls(
            shape.experts,
            shape.hidden_size,
            shape.expert_size,
            shape.dtype,
            shape.dtype,
            shape.activation,
            shape.clamped_gate,
            shape.deterministic,
        )

    @property
    def block_experts(self) -> int:
        """All experts, as many as are computed together."""
        return int(triton.next_power_of_2(self.mixture.num_experts))

    @property
    def all_tiles(self) -> tuple[ExpertsTiles, ...]:
        """Those for few tokens before those for many; the largest have no registers for fp32."""
        if self.deterministic:
            return (MIDDLE,)
        return (DECODE, MIDDLE) if self.dtype == torch.float32 else (DECODE, MIDDLE, PREFILL)

    def num_pairs(self, num_tokens: int) -> int:
        """Of so many tokens."""
        return num_tokens * self.mixture.per_token

    def tiles(self, num_tokens: int) -> ExpertsTiles:
        """For a step of so many tokens."""
        average = self.num_pairs(num_tokens) / self.mixture.num_experts
        *smaller, largest = self.all_tiles
        return next((tiles for tiles in smaller if average <= tiles.max_pairs), largest)

    def changes(self) -> list[int]:
        """Numbers of tokens from which on ``tiles`` are others."""
        pairs = [tiles.max_pairs * self.mixture.num_experts for tiles in self.all_tiles[:-1]]
        return [int(most // self.mixture.per_token) + 1 for most in pairs]

    def max_tiles(self, num_tokens: int, block_m: int) -> int:
        """The most tiles that so many tokens can have: each expert that there is has one, and one more for every
        ``block_m`` pairs that follow its first."""
        pairs = self.num_pairs(num_tokens)
        experts = min(pairs, self.mixture.num_experts)
        return experts + (pairs - experts) // block_m
