"""A decoder as data: everything that a backend needs to run it, and nothing about how. Knows no tensors and no
files."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto


class Activation(Enum):
    """The gate of the MLP: ``act(gate) * up``."""

    SILU = auto()
    GELU = auto()
    GELU_TANH = auto()


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


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True)
class ModelSpec:
    """A pre-norm decoder with grouped-query attention and a gated MLP.

    Each layer is ``x += o(attention(norm(x)))``, then ``x += down(act(gate(norm(x))) * up(norm(x)))``; norms are RMS
    norms. Tensor names are those of the Hugging Face checkpoints of the families that this covers.
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
    """Positions that the model was made for, its rope scaling included."""
    norm_eps: float
    activation: Activation
    rope: Rope
    windows: tuple[int | None, ...]
    """Of each layer: None attends to everything before; w to the last w positions, its own included."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """An RMS norm over each head's queries and keys before rotation."""
    tied_embeddings: bool
    """The head is the embedding matrix."""

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
        """Of the whole model, tied embeddings counted once."""
        return sum(math.prod(shape) for _, shape in self.tensors())

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Of keys and values of one position in every layer."""
        return 2 * self.num_layers * self.kv_size * element_bytes

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that a checkpoint of this model must hold."""
        hidden, vocab = self.hidden_size, self.vocab_size
        yield "model.embed_tokens.weight", (vocab, hidden)
        for layer in range(self.num_layers):
            for name, shape in self._layer_tensors():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (vocab, hidden)

    def _layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", self.query_size), ("k_proj", self.kv_size), ("v_proj", self.kv_size)):
            yield f"self_attn.{name}.weight", (rows, hidden)
            if self.qkv_bias:
                yield f"self_attn.{name}.bias", (rows,)
        if self.qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "self_attn.o_proj.weight", (hidden, self.query_size)
        if self.output_bias:
            yield "self_attn.o_proj.bias", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
        mlp = (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner)))
        for name, shape in mlp:
            yield f"mlp.{name}.weight", shape
            if self.mlp_bias:
                yield f"mlp.{name}.bias", shape[:1]
