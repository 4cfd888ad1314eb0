"""The properties of a model that its kernels are compiled for."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.kernels.cuda.attention.common import AttentionShape
from penstock.kernels.cuda.attention.plan import DecodeShape
from penstock.kernels.cuda.latent_kv import LatentShape
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape
from penstock.kernels.cuda.rope_kv import RopeKv
from penstock.kernels.cuda.sampling.tensors import SamplerShape

MEASURED_LINES = 64
"""Sampled positions in the largest step that the cost model of drafts measures, even if there are fewer rows."""
MAX_VERIFIED = 16
"""The maximum number of queries per row that decodes. With more, keys and values would be read more than once."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture of experts and its router."""

    num_experts: int
    per_token: int
    normalise: bool
    """Whether the chosen probabilities are divided by their sum."""
    biased: bool = False
    """Whether the experts' products have biases."""
    scales_inputs: bool = False
    """Whether a pair's factor multiplies its expert's input, not the output."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model, and the limits of the service that runs it."""

    hidden_size: int
    intermediate_size: int | None
    """The intermediate size of the MLP with a gate; None if no layer has one."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool = False
    """Whether the product has biases; ``output_bias`` and ``mlp_bias`` likewise."""
    gated_attention: bool = False
    """Whether the product has a gate too, as many columns as queries."""
    output_bias: bool = False
    mlp_bias: bool = False
    norms_before: bool = True
    """Whether a norm precedes attention and the MLP."""
    norms_after: bool = False
    """Whether a norm follows attention and the MLP."""
    norms_heads: bool = False
    """Whether queries and keys are normalised, each head by itself."""
    norms_queries: bool = False
    """Whether all queries are normalised as one vector, and all keys as another."""
    activation: str = "silu"
    """silu, gelu, gelu_tanh, or relu_squared without a gate."""
    gated_mlp: bool = True
    """Whether experts, and the MLP beside them, have a gate."""
    clamped_gate: tuple[float, float] | None = None
    """Alpha and limit of the clamped gate that experts use in place of the activation."""
    experts: Mixture | None = None
    """The experts that replace the MLP, in some layers or in all."""
    expert_size: int = 0
    """The intermediate size of an expert."""
    shared_size: int = 0
    """The intermediate size of the MLP that runs beside the experts on every token; 0: there is none."""
    has_fp4_experts: bool = False
    """Whether experts are in MXFP4."""
    latent: LatentShape | None = None
    """Latent attention, whose only KV head is the cached vector."""
    has_kv: bool = True
    """Whether layers have keys and values of their own, and do not attend to those of others."""
    values_are_keys: bool = False
    """Whether values are the keys before norm and rotation."""
    norms_values: bool = False
    """Whether each value head is normalised, without a weight."""
    input_size: int = 0
    """The size of the input that each layer has of its own; 0: there is none."""
    inputs_of_layers: int = 0
    """The size of all layers' inputs together."""
    ends_layers: bool = False
    """Whether a layer changes its output after the MLP's is added."""
    has_mlp_beside_experts: bool = False
    """Whether layers with experts have the MLP too."""
    recurrent: tuple[RecurrentShape, ...] = ()
    """The kinds of layers that have a recurrent state in place of keys and values."""
    others: tuple["ModelShape", ...] = ()
    """The layers of other sizes: for each size, the shape of a model of only such layers."""
    windows: tuple[int | None, ...] = (None,)
    """The attention windows of the model's kinds of layers, each once; None for full attention."""
    chunked_windows: bool = False
    """Whether windows are the sizes of chunks, which begin at multiples of them."""
    attention_scale: float | None = None
    """The scale of attention scores; None: 1 / sqrt(head_dim)."""
    cap: float | None = None
    """The soft cap of attention scores: s becomes cap tanh(s / cap). None: no cap."""
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    """``dtype`` or float8_e4m3fn."""
    logits_dtype: torch.dtype | None = None
    """None: ``dtype``."""
    num_logits: int | None = None
    """The number of tokens that can be sampled, from id 0 on; None: all."""
    max_positions: int
    """Positions per row."""
    max_sequences: int = 256
    """Sequences per step."""
    max_tokens: int = 8192
    """Tokens per step."""
    slots: int = 16
    """Slots per page."""
    num_window_groups: int = 0
    """The number of groups of layers with a window that have pages of their own."""
    max_drafts: int = 15
    """Drafts per row that decodes; 0: nothing is drafted."""
    deterministic: bool = False
    """Whether a token's results are bitwise the same in every batch."""
    lora_rank: int = 0
    """The largest rank of LoRA adapters; 0: there are none."""
    wide_products: bool = True
    """Whether the GPU has ``WIDE_PRODUCTS``."""

    @property
    def kinds(self) -> tuple["ModelShape", ...]:
        """For each size of layer, the shape of a model of only such layers."""
        return (self, *self.others)

    @property
    def max_pages(self) -> int:
        return -(-self.max_positions // self.slots)

    @property
    def max_sampled(self) -> int:
        """Sampled positions per step: one for each sequence, and one more for each draft."""
        if not self.max_drafts:
            return self.max_sequences
        return min(self.max_tokens, max(MEASURED_LINES, self.max_sequences * (1 + self.max_drafts)))

    @property
    def max_queries(self) -> list[int]:
        """The numbers of queries that the decoding kernel is compiled for: one token, or one token and its drafts. Rows
        with more queries are computed as prompts are."""
        return sorted({1, min(1 + self.max_drafts, MAX_VERIFIED)})

    @property
    def commits_states(self) -> bool:
        """Whether recurrent states may advance by tokens that are only known to be kept after sampling."""
        return bool(self.recurrent) and self.max_drafts > 0

    def attention(self) -> Iterator[DecodeShape]:
        """The attention of each kind of layer, for each number of queries in ascending order."""
        for layer in dict.fromkeys(kind.attention_of(window) for kind in self.kinds for window in kind.windows):
            for max_queries in (0,) if self.deterministic else self.max_queries:
                yield DecodeShape(layer, max_queries)

    def attention_of(self, window: int | None) -> AttentionShape:
        """The attention of layers with that window."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim if self.latent is None else self.latent.kv_lora_rank,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            rotated_dim=0 if self.latent is None else self.latent.qk_rope_head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            window=window,
            cap=self.cap,
            chunked=self.chunked_windows and window is not None,
            wide_products=self.wide_products,
        )

    def sampler(self) -> SamplerShape:
        """The shape of the sampler. Rows of logits are contiguous."""
        num_logits = self.num_logits or self.vocab_size
        return SamplerShape(num_logits, self.logits_dtype or self.dtype, num_logits, self.max_positions)

    @property
    def products(self) -> list[tuple[int, int, bool]]:
        """The matrix products of a layer, each as outputs, inputs, and whether there is a bias: QKV, attention output
        (or those of latent attention), gate and up, down; then those of the shared experts, of the layer's input, of
        all layers' inputs and of recurrent layers."""
        width, hidden, own = self.num_heads * self.head_dim, self.hidden_size, self.input_size
        qkv = self.heads.row_heads * self.head_dim + (width if self.gated_attention else 0)
        attention = [(qkv, hidden, self.qkv_bias), (hidden, width, self.output_bias)]
        if self.latent is not None:
            attention = [(*product, False) for product in self.latent.products(self.num_heads, hidden)]
        mlp = [self.gate_up, (hidden, self.gate_up[0] // 2, self.mlp_bias)] if self.gate_up else []
        halves = 2 if self.gated_mlp else 1
        shared = [(halves * self.shared_size, hidden, False), (hidden, self.shared_size, False)]
        shared = shared if self.shared_size else []
        inputs = [(own, hidden, False), (hidden, own, False), (self.inputs_of_layers, hidden, False)] if own else []
        return attention + mlp + shared + inputs + [product for kind in self.recurrent for product in kind.products]

    @property
    def gate_up(self) -> tuple[int, int, bool] | None:
        """The product of gate and up among ``products``; None without an MLP."""
        if self.intermediate_size is None:
            return None
        return (2 * self.intermediate_size, self.hidden_size, self.mlp_bias)

    @property
    def heads(self) -> RopeKv:
        """What ``rope_kv`` is compiled for."""
        return RopeKv(
            dtype=self.dtype,
            kv_dtype=self.kv_dtype if self.has_kv else self.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if self.has_kv else 0,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
            slots=self.slots if self.has_kv else 1,
            norm_eps=self.norm_eps if self.norms_heads else None,
            value_eps=self.norm_eps if self.norms_values and self.has_kv else None,
            values_are_keys=self.values_are_keys and self.has_kv,
        )
