"""Describes a decoder as data: everything that a backend needs to run it, and nothing about how. Does not depend on
tensors or files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from penstock.models.architecture.recurrent import RecurrentMixer, mixer_tensors, state_floats
from penstock.models.architecture.spec_parts import (
    Activation,
    AttentionSizes,
    Experts,
    LatentAttention,
    LayerInputs,
    NamedShape,
    NormKind,
    NormPlacement,
    NoRope,
    PositionTable,
    QkNorm,
    QueryScaling,
    Rope,
    RowFactor,
    linear_tensors,
    mlp_tensors,
)
from penstock.models.errors import ModelError

BESIDE_NORMS = ("mlp.gate_norm", "mlp.experts_norm", "mlp.experts_post_norm", "mlp.dense_post_norm")
"""Norms of a layer with experts beside its MLP: before the router, before the experts, after them, and after the
MLP."""

ONES = ("norm.weight", "layer_scalar", "per_expert_scale")
"""Name endings of tensors that multiply. With random weights they are 1."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder with grouped-query attention or recurrent layers, and a gated MLP, or experts.

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
    """If layers differ, the largest."""
    intermediate_sizes: tuple[int, ...] | None
    """The intermediate size of each layer; None: all have the same."""
    num_layers: int
    left_out_layers: tuple[int, ...]
    """The numbers of the checkpoint's layers that are not part of the decoder. The others are numbered without gaps."""
    num_heads: int
    num_kv_heads: int
    """The number is 1 with latent attention: all query heads attend to the vector that is cached."""
    head_dim: int
    latent: LatentAttention | None
    """None: each KV head has keys and values."""
    unwindowed: AttentionSizes | None
    """The sizes in layers without a window, if they differ from those in the others."""
    recurrent: tuple[RecurrentMixer | None, ...]
    """The recurrent mixer of each layer, in place of attention or beside it; None: it has only attention."""
    attends_beside_recurrent: bool
    """Whether layers with a recurrent mixer have attention too. Both read the same, and the layer adds their sum."""
    mlp_only: tuple[bool, ...] | None
    """If layers have one norm, and either a mixer or the MLP: whether each has the MLP. None: layers have both."""
    kv_sources: tuple[int, ...]
    """The layer whose keys and values each layer attends to: itself, or an earlier one with the same window and sizes.
    In the second case it computes none."""
    value_norm: bool
    """Whether each value head has an RMS norm, without a weight."""
    max_positions: int
    """The number of positions that the model was made for, including its rope scaling."""
    norm_kind: NormKind
    norm_parts: tuple[str, ...]
    """The tensors of a layer's norm: ``weight`` and ``bias``, only ``weight``, or none. Norms of queries and keys have
    no bias."""
    norm_eps: float
    norm_offset: float
    """All norms multiply by this + weight, in float32: 0 or 1."""
    norm_placement: NormPlacement
    qk_norm: QkNorm
    qk_norm_is_last: bool
    """Whether queries and keys are rotated before their norm, not after it."""
    activation: Activation
    gated_mlp: bool
    """Whether the MLP and the experts have a gate."""
    ropes: tuple[Rope, ...]
    """The rope of each layer."""
    rotary_dim: int
    """The number of a head's dimensions, from the first on, that are rotated; even."""
    interleaved_rope: bool
    """Whether the checkpoint rotates neighbouring dimensions (2i, 2i + 1) with each other. A backend gets the rows of
    queries and keys in an order in which these are the pairs (i, i + rotary_dim / 2)."""
    query_scaling: QueryScaling | None
    windows: tuple[int | None, ...]
    """The window of each layer. None attends to everything before; w to the last w positions, including its own."""
    chunked_windows: bool
    """Whether a window w is instead the size of chunks, which begin at multiples of it: a position attends to those
    before it in its own chunk."""
    qkv_bias: bool
    gated_attention: bool
    """Whether attention's outputs are multiplied by the sigmoid of a linear of its input, before the output linear."""
    output_bias: bool
    mlp_bias: bool
    attention_scale: float
    """The factor of the scores."""
    attention_soft_cap: float | None
    """A cap c turns a scaled score s into ``c tanh(s / c)``."""
    sinks: bool
    """Whether each query head has an extra score, without a value, that takes part in the softmax."""
    embedding_scale: float
    """The factor of embeddings."""
    rounds_embedding_scale: bool
    """Whether that factor is rounded to the model's dtype."""
    layer_inputs: LayerInputs | None
    layer_scalars: bool
    """Whether each layer's output is multiplied by a scalar of its own."""
    position_table: PositionTable | None
    logit_scale: float
    """The factor of logits, before the cap."""
    logit_soft_cap: float | None
    head_bias: bool
    experts: Experts | None
    """None: every layer has the MLP."""
    tied_embeddings: bool
    """Whether the head is the embedding matrix."""
    factors: tuple[RowFactor, ...]

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
    def output_columns(self) -> int:
        """Input columns of the output projection: the values of all query heads."""
        return self.query_size if self.latent is None else self.num_heads * self.latent.v_head_dim

    @property
    def head_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab_size

    @property
    def has_head(self) -> bool:
        """Whether there is an output head."""
        return True

    @property
    def has_table(self) -> bool:
        """Whether there is an embedding besides the output head."""
        return not self.tied_embeddings

    def at(self, layer: int) -> "ModelSpec":
        """Returns the model with the sizes of this layer in place of those that vary between layers."""
        changes: dict[str, Any] = {}
        if self.intermediate_sizes is not None:
            changes["intermediate_size"] = self.intermediate_sizes[layer]
        if self.unwindowed is not None and self.windows[layer] is None:
            sizes = self.unwindowed
            changes |= {"num_kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim, "rotary_dim": sizes.head_dim}
        return replace(self, **changes) if changes else self

    @property
    def rotations(self) -> list[tuple[Rope, int]]:
        """The rope of each layer, and the number of dimensions that it rotates."""
        return [(rope, self.at(layer).rotary_dim) for layer, rope in enumerate(self.ropes)]

    def layers_by_kv_sizes(self, part: range | None = None) -> dict[tuple[int, int], list[int]]:
        """Groups the layers, or these, that have keys and values of their own by number of KV heads and head size."""
        layers_of: dict[tuple[int, int], list[int]] = {}
        for layer in filter(self.has_kv, part or range(self.num_layers)):
            sizes = self.at(layer)
            layers_of.setdefault((sizes.num_kv_heads, sizes.head_dim), []).append(layer)
        return layers_of

    def has_kv(self, layer: int) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.kv_sources[layer] == layer and self.attends(layer)

    def attends(self, layer: int) -> bool:
        """Whether the layer has attention."""
        return self.has_mixer(layer) and (self.recurrent[layer] is None or self.attends_beside_recurrent)

    def has_mixer(self, layer: int) -> bool:
        """Whether the layer has attention or a recurrent mixer."""
        return self.mlp_only is None or not self.mlp_only[layer]

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has an MLP or experts."""
        return self.mlp_only is None or self.mlp_only[layer]

    @property
    def has_state(self) -> bool:
        """Whether a layer is recurrent."""
        return any(mixer is not None for mixer in self.recurrent)

    @property
    def state_floats(self) -> int:
        """The numbers that the state of all recurrent layers has."""
        return sum(state_floats(mixer) for mixer in self.recurrent if mixer is not None)

    def factors_of(self, name: str) -> list[RowFactor]:
        """Returns the factors of a tensor of ``tensors``."""
        local = name.removeprefix("model.layers.").partition(".")[2]
        return [factor for factor in self.factors if factor.tensor == local]

    def values_are_keys(self, layer: int) -> bool:
        """Whether the layer has no linear for values."""
        return self.unwindowed is not None and self.unwindowed.values_are_keys and self.windows[layer] is None

    def qkv_rows(self, layer: int) -> dict[str, int]:
        """Returns the layer's linears of queries, keys, values and the gate, as many as it has, with their numbers of
        rows."""
        if self.latent is not None:
            return self.latent.first_rows(self.num_heads)
        sizes = self.at(layer)
        if not self.has_kv(layer):
            return {"q_proj": sizes.query_size}
        values = {} if self.values_are_keys(layer) else {"v_proj": sizes.kv_size}
        gate = {"gate_proj": sizes.query_size} if self.gated_attention else {}
        return {"q_proj": sizes.query_size, "k_proj": sizes.kv_size, **values, **gate}

    def kv_bytes_per_token(self, element_bytes: int, part: range | None = None) -> int:
        """Returns the bytes that one position's keys and values or latents take, over all layers, or over these."""
        groups = self.layers_by_kv_sizes(part).items()
        vectors = 2 if self.latent is None else 1
        return vectors * element_bytes * sum(heads * size * len(layers) for (heads, size), layers in groups)

    def divided(self, num_ranks: int) -> "ModelSpec":
        """The part of the model that each of ``num_ranks`` ranks computes: its share of the heads and of the inner
        columns of MLP and experts, and everything else in full. Raises ModelError if they cannot be divided equally.
        """
        wholes = {"key and value heads" if self.latent is None else "latent for all heads": self.num_kv_heads}
        experts = self.experts
        if self.unwindowed is not None:
            wholes["key and value heads of layers without a window"] = self.unwindowed.num_kv_heads
        if experts is None or not all(experts.layers) or experts.beside_mlp:
            wholes["inner columns of an MLP"] = math.gcd(*(self.intermediate_sizes or (self.intermediate_size,)))
        if experts is not None:
            wholes["inner columns of an expert"] = experts.intermediate_size
        if experts is not None and experts.shared_size:
            wholes["inner columns of the shared expert"] = experts.shared_size
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
            unwindowed=self.unwindowed
            and replace(self.unwindowed, num_kv_heads=self.unwindowed.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            intermediate_sizes=self.intermediate_sizes and tuple(size // num_ranks for size in self.intermediate_sizes),
            experts=experts
            and replace(
                experts,
                intermediate_size=experts.intermediate_size // num_ranks,
                shared_size=experts.shared_size // num_ranks,
            ),
        )

    def tensors(self) -> Iterator[NamedShape]:
        """Yields the name and shape of every tensor that a checkpoint of this model must contain."""
        hidden, vocab = self.hidden_size, self.vocab_size
        yield "model.embed_tokens.weight", (vocab, hidden)
        if self.position_table is not None:
            yield "model.embed_positions.weight", (self.position_table.num_rows, hidden)
        if self.layer_inputs is not None:
            columns = self.num_layers * self.layer_inputs.size
            yield "model.embed_tokens_per_layer.weight", (self.layer_inputs.vocab_size, columns)
            yield "model.per_layer_model_projection.weight", (columns, hidden)
            yield "model.per_layer_projection_norm.weight", (self.layer_inputs.size,)
        for layer in range(self.num_layers):
            for name, shape in self._layer_tensors(layer):
                yield f"model.layers.{layer}.{name}", shape
        yield from self._norm("model.norm")
        if not self.tied_embeddings:
            yield "lm_head.weight", (vocab, hidden)
        if self.head_bias:
            yield "lm_head.bias", (vocab,)

    def norms_qk(self, layer: int) -> bool:
        """Whether the layer's queries and keys have a norm."""
        if self.qk_norm is QkNorm.UNWEIGHTED:
            return not isinstance(self.ropes[layer], NoRope)
        return self.qk_norm is not QkNorm.NONE

    def scales_queries(self, layer: int) -> bool:
        """Whether ``query_scaling`` applies to the layer."""
        scaling = self.query_scaling
        return scaling is not None and (not scaling.only_unrotated or isinstance(self.ropes[layer], NoRope))

    def has_experts(self, layer: int) -> bool:
        """Whether the layer has experts, instead of the MLP or beside it."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def layer_norms(self) -> tuple[str | None, str | None, str | None, str | None]:
        """Names of a layer's norms: before and after attention, before and after the MLP; None where there is none."""
        return self.norm_placement.norms

    def norms_of(self, layer: int) -> tuple[str | None, str | None, str | None, str | None]:
        """Returns ``layer_norms``, or the only norm that the layer has, in its place."""
        only = (None, None, "norm", None) if self.has_mlp(layer) else ("norm", None, None, None)
        return self.layer_norms if self.mlp_only is None else only

    @property
    def is_parallel(self) -> bool:
        """Whether a layer's MLP does not see the output of its attention."""
        return self.norm_placement in (NormPlacement.PARALLEL, NormPlacement.PARALLEL_NORMS)

    @property
    def qk_norm_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the weights of the norms of queries and of keys."""
        match self.qk_norm:
            case QkNorm.EACH_HEAD:
                return (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
            case QkNorm.ALL:
                return (self.query_size,), (self.kv_size,)
            case _:
                return (self.head_dim,), (self.head_dim,)

    def _layer_tensors(self, layer: int) -> Iterator[NamedShape]:
        hidden, sizes = self.hidden_size, self.at(layer)
        for norm in self.norms_of(layer):
            if norm is not None:
                yield from self._norm(norm)
        mixer = self.recurrent[layer]
        if mixer is not None:
            yield from mixer_tensors(mixer, hidden)
        if self.attends(layer):
            yield from self._attention_tensors(layer)
        if self.layer_inputs is not None:
            yield "per_layer_input_gate.weight", (self.layer_inputs.size, hidden)
            yield "per_layer_projection.weight", (hidden, self.layer_inputs.size)
            yield from self._norm("post_per_layer_input_norm")
        if self.layer_scalars:
            yield "layer_scalar", (1,)
        beside_mlp = self.experts is not None and self.experts.beside_mlp
        if self.has_mlp(layer) and (beside_mlp or not self.has_experts(layer)):
            yield from mlp_tensors("mlp", hidden, sizes.intermediate_size, self.mlp_bias, self.gated_mlp)
        if self.experts is not None and self.has_experts(layer):
            for norm in BESIDE_NORMS if beside_mlp else ():
                yield from self._norm(norm)
            yield from self.experts.tensors(hidden, self.gated_mlp)

    def _attention_tensors(self, layer: int) -> Iterator[NamedShape]:
        sizes = self.at(layer)
        for name, rows in self.qkv_rows(layer).items():
            yield from linear_tensors(f"self_attn.{name}", rows, self.qkv_columns, self.qkv_bias)
        if self.latent is not None:
            for name, shape in self.latent.latent_tensors(self.num_heads).items():
                yield f"self_attn.{name}", shape
        if self.qk_norm not in (QkNorm.NONE, QkNorm.UNWEIGHTED):
            names = ("q_norm", "k_norm") if self.has_kv(layer) else ("q_norm",)
            for name, shape in zip(names, sizes.qk_norm_shapes, strict=False):
                yield f"self_attn.{name}.weight", shape
        if self.sinks:
            yield "self_attn.sinks", (self.num_heads,)
        yield from linear_tensors("self_attn.o_proj", self.hidden_size, sizes.output_columns, self.output_bias)

    def _norm(self, name: str) -> Iterator[NamedShape]:
        return ((f"{name}.{part}", (self.hidden_size,)) for part in self.norm_parts)
