"""What of a model its kernels are compiled for, and some models that have different kernels."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.kernels.cuda.attention.common import AttentionShape
from penstock.kernels.cuda.attention.plan import DecodeShape
from penstock.kernels.cuda.sampling.tensors import SamplerShape

MEASURED_LINES = 64
"""Of the largest step that is measured to know what drafts cost; however few rows there may be."""
MAX_VERIFIED = 16
"""Queries of a row: with more, its keys and values would have to be read more than once."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Of experts: what their router does."""

    num_experts: int
    per_token: int
    normalise: bool
    """The chosen probabilities are divided by their sum."""
    biased: bool = False
    """The experts' products have biases."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model, and what serves it."""

    hidden_size: int
    intermediate_size: int | None
    """Of the MLP; None where every layer has experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool = False
    """Products have biases."""
    output_bias: bool = False
    mlp_bias: bool = False
    norms_before: bool = True
    """Attention and the MLP have a norm before them."""
    norms_after: bool = False
    """They have one after them."""
    norms_heads: bool = False
    """Queries and keys are normed, each head by itself."""
    norms_queries: bool = False
    """All queries are normed as one vector, and so are all keys."""
    activation: str = "silu"
    """silu, gelu or gelu_tanh."""
    clamped_gate: tuple[float, float] | None = None
    """Alpha and limit of the gate that experts have in the place of the activation."""
    experts: Mixture | None = None
    """In the place of the MLP, in some layers or in all."""
    expert_size: int = 0
    """The intermediate size of an expert."""
    windows: tuple[int | None, ...] = (None,)
    """Of attention: None in a layer that sees all. Each kind of layer once."""
    attention_scale: float | None = None
    """Of attention's scores; None: 1 / sqrt(head_dim)."""
    cap: float | None = None
    """Attention scores s become cap tanh(s / cap); None: they are kept."""
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    """``dtype`` or float8_e4m3fn."""
    logits_dtype: torch.dtype | None = None
    """None: ``dtype``."""
    num_logits: int | None = None
    """Tokens that can be sampled, from the first on; None: all."""
    max_positions: int
    """Of a row."""
    max_sequences: int = 256
    """Of a step."""
    max_tokens: int = 8192
    """Of a step."""
    slots: int = 16
    """Of a page."""
    max_drafts: int = 15
    """Of a row that decodes; 0: nothing is drafted."""
    deterministic: bool = False
    """A token's results are the same bits in every batch."""

    @property
    def max_pages(self) -> int:
        """Of a row."""
        return -(-self.max_positions // self.slots)

    @property
    def max_lines(self) -> int:
        """Of logits, of a step: each sequence has one, and one more for each draft."""
        if not self.max_drafts:
            return self.max_sequences
        return min(self.max_tokens, max(MEASURED_LINES, self.max_sequences * (1 + self.max_drafts)))

    @property
    def max_queries(self) -> list[int]:
        """Of a row that decodes: one token, or one and its drafts. Rows of more are computed like prompts."""
        return sorted({1, min(1 + self.max_drafts, MAX_VERIFIED)})

    def attention(self) -> Iterator[DecodeShape]:
        """Of each kind of layer, for each number of queries, ascending."""
        for window in self.windows:
            layer = AttentionShape(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
                window=window,
                cap=self.cap,
            )
            for max_queries in (0,) if self.deterministic else self.max_queries:
                yield DecodeShape(layer, max_queries)

    def sampler(self) -> SamplerShape:
        """Lines of logits lie one behind the other."""
        num_logits = self.num_logits or self.vocab_size
        return SamplerShape(num_logits, self.logits_dtype or self.dtype, num_logits, self.max_positions)

    @property
    def products(self) -> list[tuple[int, int, bool]]:
        """Outputs and inputs of a layer's, and whether there is a bias: queries, keys and values; their heads' output;
        gate and up; down."""
        width, hidden, inner = self.num_heads * self.head_dim, self.hidden_size, self.intermediate_size
        attention = [
            (width + 2 * self.num_kv_heads * self.head_dim, hidden, self.qkv_bias),
            (hidden, width, self.output_bias),
        ]
        mlp = [] if inner is None else [(2 * inner, hidden, self.mlp_bias), (hidden, inner, self.mlp_bias)]
        return attention + mlp


SHAPES = {
    "Qwen3-0.6B": ModelShape(
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        norms_heads=True,
        max_positions=40960,
    ),
    "Llama-3.1-8B": ModelShape(
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=128256,
        norm_eps=1e-5,
        max_positions=131072,
    ),
    "Gemma-3-1B": ModelShape(
        hidden_size=1152,
        intermediate_size=6912,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        rotary_dim=256,
        vocab_size=262144,
        norm_eps=1e-6,
        norms_after=True,
        norms_heads=True,
        activation="gelu_tanh",
        windows=(512, None),
        max_positions=32768,
    ),
    "Gemma-2-2B": ModelShape(
        hidden_size=2304,
        intermediate_size=9216,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rotary_dim=256,
        vocab_size=256000,
        norm_eps=1e-6,
        norms_after=True,
        activation="gelu_tanh",
        windows=(4096, None),
        cap=50.0,
        logits_dtype=torch.float32,
        max_positions=8192,
    ),
    "OLMo-2-1B": ModelShape(
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        rotary_dim=128,
        vocab_size=100352,
        norm_eps=1e-6,
        norms_before=False,
        norms_after=True,
        norms_queries=True,
        max_positions=4096,
    ),
    "Phi-4-mini": ModelShape(
        hidden_size=3072,
        intermediate_size=8192,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=96,
        vocab_size=200064,
        norm_eps=1e-5,
        max_positions=131072,
    ),
    "gpt-oss-20b": ModelShape(
        hidden_size=2880,
        intermediate_size=None,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rotary_dim=64,
        vocab_size=201088,
        norm_eps=1e-5,
        qkv_bias=True,
        output_bias=True,
        clamped_gate=(1.702, 7.0),
        windows=(128, None),
        experts=Mixture(num_experts=32, per_token=4, normalise=True, biased=True),
        expert_size=2880,
        max_positions=131072,
    ),
    "Qwen3-30B-A3B": ModelShape(
        hidden_size=2048,
        intermediate_size=None,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rotary_dim=128,
        vocab_size=151936,
        norm_eps=1e-6,
        norms_heads=True,
        experts=Mixture(num_experts=128, per_token=8, normalise=True),
        expert_size=768,
        max_positions=40960,
    ),
    "Mixtral-8x7B": ModelShape(
        hidden_size=4096,
        intermediate_size=None,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=32000,
        norm_eps=1e-5,
        experts=Mixture(num_experts=8, per_token=2, normalise=True),
        expert_size=14336,
        max_positions=32768,
    ),
}
