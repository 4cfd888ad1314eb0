"""The shapes that the kernels of a mixture of experts are compiled for, and the sizes of its tiles. A *pair* is a token
with one of its experts; a *tile* is up to ``block_m`` pairs of the same expert, which are computed together."""

from dataclasses import dataclass, replace

import torch
import triton

from penstock.kernels.cuda.model_shapes import Mixture, ModelShape

FP4_GROUP = 32
"""The columns that share a scale in MXFP4."""


@dataclass(frozen=True)
class MoeTiles:
    """The sizes of one of the two products, for Hopper's shared memory and registers."""

    block_n: int
    """Columns of the result per program."""
    block_k: int
    """Elements of a row that are read at a time, if they have 16 bits."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExpertsTiles:
    """The sizes of both products."""

    block_m: int
    """The maximum number of pairs in a tile."""
    max_pairs: float
    """The maximum average number of pairs per expert for which these tiles are used."""
    gate_up: MoeTiles
    down: MoeTiles


DECODE = ExpertsTiles(16, 8, MoeTiles(32, 128, 4, 5), MoeTiles(32, 128, 4, 6))
"""For few tokens, bound by reading weights: small programs, so that even one token's experts keep the whole GPU busy,
and many loads in flight."""
MIDDLE = ExpertsTiles(64, 64, MoeTiles(64, 64, 4, 4), MoeTiles(128, 64, 4, 4))
"""The smallest tiles for Hopper's wgmma instructions, which are still faster than reading the weights."""
PREFILL = ExpertsTiles(128, float("inf"), MoeTiles(128, 64, 8, 4), MoeTiles(256, 64, 8, 4))
"""For many tokens, bound by matrix products: as large as registers allow, to read as little as possible per product."""
PREFILL_FP4 = replace(PREFILL, down=PREFILL.gate_up)
"""The same with weights in MXFP4, whose conversion takes registers."""
PREFILL_NARROW = replace(PREFILL, gate_up=MoeTiles(64, 64, 8, 4), down=MoeTiles(128, 64, 8, 4))
"""The same on a GPU without wide products, whose operands take registers."""


@dataclass(frozen=True)
class ExpertsShape:
    """The sizes and types for which the kernels of a model's experts are compiled."""

    mixture: Mixture
    hidden_size: int
    intermediate_size: int
    """The intermediate size of an expert."""
    dtype: torch.dtype
    logits_dtype: torch.dtype
    """The dtype of the router's logits."""
    activation: str = "silu"
    """silu, gelu, gelu_tanh or relu_squared."""
    gated: bool = True
    """Whether experts have a gate. Without it, the activation is that of up."""
    clamped_gate: tuple[float, float] | None = None
    """Alpha and limit of the clamped gate that replaces the activation."""
    is_fp4: bool = False
    """Whether weights are in MXFP4."""
    deterministic: bool = False
    """Whether a token's result is bitwise the same in every batch. Tiles of different sizes use different instructions,
    so all steps then use ``MIDDLE``."""
    wide_products: bool = True
    """Whether the GPU has ``WIDE_PRODUCTS``."""

    def __post_init__(self) -> None:
        assert 1 <= self.mixture.per_token <= self.mixture.num_experts
        assert self.dtype in (torch.float32, torch.bfloat16, torch.float16)
        assert self.logits_dtype in (torch.float32, self.dtype)
        assert self.gated or (self.clamped_gate is None and not self.is_fp4)
        assert not self.is_fp4 or self.hidden_size % FP4_GROUP == self.intermediate_size % FP4_GROUP == 0

    @classmethod
    def of(cls, shape: ModelShape) -> "ExpertsShape":
        """The shape of the experts of a model whose router has the model's dtype."""
        assert shape.experts is not None
        return cls(
            shape.experts,
            shape.hidden_size,
            shape.expert_size,
            shape.dtype,
            shape.dtype,
            shape.activation,
            shape.gated_mlp,
            shape.clamped_gate,
            shape.has_fp4_experts,
            shape.deterministic,
            shape.wide_products,
        )

    @property
    def first_rows(self) -> int:
        """The rows of an expert in the first product: gate and up, or up."""
        return (2 if self.gated else 1) * self.intermediate_size

    @property
    def block_experts(self) -> int:
        """The number of experts, rounded up to a power of 2 for computing."""
        return int(triton.next_power_of_2(self.mixture.num_experts))

    @property
    def all_tiles(self) -> tuple[ExpertsTiles, ...]:
        """All tiles, from those for few tokens to those for many. The largest need too many registers with fp32."""
        if self.deterministic:
            return (MIDDLE,)
        if self.dtype == torch.float32:
            return DECODE, MIDDLE
        if not self.wide_products:
            return DECODE, MIDDLE, PREFILL_NARROW
        return DECODE, MIDDLE, PREFILL_FP4 if self.is_fp4 else PREFILL

    def num_pairs(self, num_tokens: int) -> int:
        return num_tokens * self.mixture.per_token

    def tiles(self, num_tokens: int) -> ExpertsTiles:
        average = self.num_pairs(num_tokens) / self.mixture.num_experts
        *smaller, largest = self.all_tiles
        return next((tiles for tiles in smaller if average <= tiles.max_pairs), largest)

    def changes(self) -> list[int]:
        """The numbers of tokens at which ``tiles`` changes."""
        pairs = [tiles.max_pairs * self.mixture.num_experts for tiles in self.all_tiles[:-1]]
        return [int(most // self.mixture.per_token) + 1 for most in pairs]

    def max_tiles(self, num_tokens: int, block_m: int) -> int:
        """The maximum number of tiles of ``num_tokens`` tokens: one for each expert, and one more for every ``block_m``
        pairs after an expert's first."""
        pairs = self.num_pairs(num_tokens)
        experts = min(pairs, self.mixture.num_experts)
        return experts + (pairs - experts) // block_m
