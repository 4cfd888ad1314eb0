"""Describes a decoder as data: everything that a backend needs to run it, and nothing about how. Does not depend on
tensors or files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from penstock.models.errors import ModelError


class Activation(Enum):
    """The activation of the MLP: ``act(gate) * up``."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()


NamedShape = tuple[str, tuple[int, ...]]
"""A tensor's name and shape."""


@dataclass(frozen=True)
class DefaultRope:
    """Rotary embedding as first published: pair i of a head of D turns by ``position * theta^(-2i/D)``."""

    theta: float


@dataclass(frozen=True)
class LinearRope:
    """Every frequency is divided by ``factor``."""

    theta: float
    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated smoothly."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): frequencies blend by a ramp between the rotations ``beta_slow`` and ``beta_fast``, and
    cosines and sines are scaled by ``attention_factor``."""

    theta: float
    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv 2402.13753) within the original context: the frequency of pair i is divided by ``factors[i]``,
    and cosines and sines are scaled by ``attention_factor``."""

    theta: float
    factors: tuple[float, ...]
    attention_factor: float


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | LongRope


class NormPlacement(Enum):
    """The placement of a layer's RMS norms. In the formulas, f is attention or the MLP."""

    PRE = auto()
    """x += f(norm(x))"""
    BOTH = auto()
    """x += norm(f(norm(x)))"""
    POST = auto()
    """x += norm(f(x))"""


class QkNorm(Enum):
    """The RMS norm of queries and keys before rotation."""

    NONE = auto()
    HEAD = auto()
    """Over each head; all heads share a weight."""
    ALL = auto()
    """Over all query heads as one vector, and over all key heads as one."""


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's activation: ``g sigmoid(alpha g) (u + 1)``, where g is gate limited to at most ``limit``, and u is up
    limited to [-limit, limit].
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts instead of the MLP: the sum of the outputs of the ``per_token`` experts with the highest
    router probabilities, each multiplied by its probability. The softmax covers all experts.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    normalise: bool
    """Whether the chosen probabilities are divided by their sum, which is a softmax over only the chosen experts."""
    biased: bool
    """Whether the router and the experts' linears have biases."""
    gate: ClampedGate | None
    """The activation of the experts, if it is not ``act(gate) * up``."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; the others have the MLP."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder with grouped-query attention and a gated MLP, or experts.

    Each layer is ``x += o(attention(norm(x)))``, then ``x += down(act(gate(norm(x))) * up(norm(x)))``, with the norms
    that ``norm_placement`` specifies. Tensor names are those of most Hugging Face checkpoints; ``tensor_names`` finds
    the tensors in checkpoints with other names or layouts.
    """

    architecture: str
    """The name in the config's ``architectures``."""
    vocab_size: int
    """Rows of the embedding and of the logits; may exceed the tokenizer's vocabulary."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """The number of positions that the model was made for, including its rope scaling."""
    norm_eps: float
    norm_offset: float
    """All norms multiply by this + weight, in float32: 0 or 1."""
    norm_placement: NormPlacement
    qk_norm: QkNorm
    activation: Activation
    ropes: tuple[Rope, ...]
    """The rope of each layer."""
    rotary_dim: int
    """The number of a head's dimensions, from the first on, that are rotated; even."""
    windows: tuple[int | None, ...]
    """The window of each layer. None attends to everything before; w to the last w positions, including its own."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float
    """The factor of the scores."""
    attention_soft_cap: float | None
    """A cap c turns a scaled score s into ``c tanh(s / c)``."""
    sinks: bool
    """Whether each query head has an extra score, without a value, that takes part in the softmax."""
    embedding_scale: float
    """The factor of embeddings, rounded to the model's dtype."""
    logit_soft_cap: float | None
    experts: Experts | None
    """None: every layer has the MLP."""
    tied_embeddings: bool
    """Whether the head is the embedding matrix."""

    @property
    def query_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the whole model; tied embeddings count once."""
        return sum(math.prod(shape) for _, shape in self.tensors())

    def num_loaded(self, num_logits: int, num_ranks: int) -> int:
        """The most parameters that a rank loads of its part of the model: all, except that of an untied head it loads
        only its share of the first ``num_logits`` rows.
        """
        unloaded = 0 if self.tied_embeddings else self.vocab_size - -(-num_logits // num_ranks)
        return self.num_parameters - unloaded * self.hidden_size

    @property
    def qkv_columns(self) -> int:
        """Input columns of queries, keys and values."""
        return self.hidden_size

    @property
    def head_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab_size

    @property
    def has_table(self) -> bool:
        """Whether there is an embedding besides the output head."""
        return not self.tied_embeddings

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Returns the bytes that one position's keys and values take, over all layers."""
        return 2 * self.num_layers * self.kv_size * element_bytes

    def divided(self, num_ranks: int) -> "ModelSpec":
        """The part of the model that each of ``num_ranks`` ranks computes: its share of the heads and of the inner
        columns of MLP and experts, and everything else in full. Raises ModelError if they cannot be divided equally.
        """
        wholes = {"key and value heads": self.num_kv_heads}
        experts = self.experts
        if experts is None or not all(experts.layers):
            wholes["inner columns of an MLP"] = self.intermediate_size
        if experts is not None:
            wholes["inner columns of an expert"] = experts.intermediate_size
        for name, whole in wholes.items():
            if whole % num_ranks:
                most = math.gcd(*wholes.values())
                possible = [str(count) for count in range(2, most + 1) if most % count == 0]
                remedy = f"give {' or '.join(possible)}, or leave it out" if possible else "leave it out"
                raise ModelError(
                    f"--tensor-parallel-size {num_ranks}: the model has {whole} {name}, which these ranks can't "
                    f"share equally: {remedy}"
                )
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
            intermediate_size=self.intermediate_size // num_ranks,
            experts=experts and replace(experts, intermediate_size=experts.intermediate_size // num_ranks),
        )

    def tensors(self) -> Iterator[NamedShape]:
        """Yields the name and shape of every tensor that a checkpoint of this model must contain."""
        hidden, vocab = self.hidden_size, self.vocab_size
        yield "model.embed_tokens.weight", (vocab, hidden)
        for layer in range(self.num_layers):
            for name, shape in self._layer_tensors(layer):
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (vocab, hidden)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts instead of the MLP."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def layer_norms(self) -> tuple[str | None, str | None, str | None, str | None]:
        """Names of a layer's norms: before and after attention, before and after the MLP; None where there is none."""
        match self.norm_placement:
            case NormPlacement.PRE:
                return "input_layernorm", None, "post_attention_layernorm", None
            case NormPlacement.BOTH:
                return (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                )
            case NormPlacement.POST:
                return None, "post_attention_layernorm", None, "post_feedforward_layernorm"

    def _layer_tensors(self, layer: int) -> Iterator[NamedShape]:
        hidden = self.hidden_size
        for norm in self.layer_norms:
            if norm is not None:
                yield f"{norm}.weight", (hidden,)
        for name, rows in (("q_proj", self.query_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            yield from _linear(f"self_attn.{name}", rows, self.qkv_columns, self.qkv_bias)
        if self.qk_norm is not QkNorm.NONE:
            whole = self.qk_norm is QkNorm.ALL
            yield "self_attn.q_norm.weight", (self.query_size if whole else self.head_dim,)
            yield "self_attn.k_norm.weight", (self.kv_size if whole else self.head_dim,)
        if self.sinks:
            yield "self_attn.sinks", (self.num_heads,)
        yield from _linear("self_attn.o_proj", hidden, self.query_size, self.output_bias)
        if self.experts is None or not self.has_experts(layer):
            yield from _mlp("mlp", hidden, self.intermediate_size, self.mlp_bias)
            return
        yield from _linear("mlp.gate", self.experts.num_experts, hidden, self.experts.biased)
        for expert in range(self.experts.num_experts):
            yield from _mlp(f"mlp.experts.{expert}", hidden, self.experts.intermediate_size, self.experts.biased)


def _linear(name: str, rows: int, columns: int, biased: bool) -> Iterator[NamedShape]:
    yield f"{name}.weight", (rows, columns)
    if biased:
        yield f"{name}.bias", (rows,)


def _mlp(name: str, hidden: int, inner: int, biased: bool) -> Iterator[NamedShape]:
    for part, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        yield from _linear(f"{name}.{part}", rows, columns, biased)
