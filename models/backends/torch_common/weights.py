"""A model's weights as the backends in torch hold them: fused where one product can do the work of several, and each
part of a layer as a callable."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.reference.ops import layer_norm, rms_norm
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.tensor_parallel import TensorParallel

Layer = Callable[[Tensor], Tensor]
"""(T, in) -> (T, out)."""
Linear = Layer
"""A linear map. Quantised kinds replace ``DenseLinear`` transparently to the model."""


@dataclass(frozen=True)
class SharedWeights:
    """Weights of another model that a head uses instead of its own; None where it has its own."""

    embedding: Tensor | None = None
    head: Linear | None = None


@dataclass(frozen=True)
class DenseLinear:
    """y = x W^T + b; ``weight`` is (out, in), ``bias`` (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm over the last dimension."""

    weight: Tensor
    """The factor, in at least fp32: the checkpoint's weight plus the model's offset."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm over the last dimension."""

    weight: Tensor
    """The factor, in at least fp32: the checkpoint's weight plus the model's offset."""
    bias: Tensor | None
    """In at least fp32."""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the shape and dtype of ``x``."""
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class HeadNorm:
    """A norm over each head."""

    norm: RmsNorm | LayerNorm
    """Its weight is (query heads + key heads, head size)."""

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` is (T, queries and keys side by side)."""
        return self.norm(x.view(-1, *self.norm.weight.shape)).flatten(1)


@dataclass(frozen=True)
class WholeNorm:
    """An RMS norm over all queries and one over all keys."""

    query: RmsNorm
    key: RmsNorm

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` is (T, queries and keys side by side)."""
        num_queries = len(self.query.weight)
        return torch.cat((self.query(x[:, :num_queries]), self.key(x[:, num_queries:])), dim=1)


@dataclass(frozen=True)
class SharedWholeNorm:
    """``WholeNorm`` with the heads divided over ranks: the means of squares are over all ranks' heads."""

    query: RmsNorm
    key: RmsNorm
    parallel: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` is (T, the rank's queries and keys side by side)."""
        norms = (self.query, self.key)
        sizes = [len(norm.weight) for norm in norms]
        parts = [upcast(part) for part in torch.split(x, sizes, dim=1)]
        sums = torch.cat([part.square().sum(1, keepdim=True) for part in parts], dim=1)
        self.parallel.all_reduce(sums)
        scaled = [
            (part * torch.rsqrt(total / (size * self.parallel.size) + norm.eps)).to(norm.weight.dtype) * norm.weight
            for part, total, size, norm in zip(parts, torch.split(sums, 1, dim=1), sizes, norms, strict=True)
        ]
        return torch.cat(scaled, dim=1).to(x.dtype)


@dataclass(frozen=True)
class Mlp:
    """y = down(activation(gate_up(x)))."""

    gate_up: Linear
    """Rows: gate, then up; only up if there is no gate."""
    down: Linear
    activation: Layer
    """Maps gate and up, side by side, to half as many columns; without a gate, to as many."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


@dataclass(frozen=True)
class ExpertMlp:
    """A mixture of experts. Each runs on the tokens whose router chose it; results are summed in the experts' order."""

    router: Linear
    gate_up: Tensor
    """(E, 2I, hidden): per expert, rows of the gate, then of up; without a gate (E, I, hidden). With exponents it is
    (E, 2I, hidden / 2), two codes of MXFP4 a byte, for kernels that read them."""
    down: Tensor
    """(E, hidden, I), or (E, hidden, I / 2)."""
    gate_up_bias: Tensor | None
    """(E, 2I)."""
    down_bias: Tensor | None
    """(E, hidden)."""
    activation: Layer
    choose: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Maps the router's outputs (T, E) to the experts of each token and their factors, both (T, per token)."""
    shared: Mlp | None
    """Runs on every token."""
    shared_gate: Linear | None
    """The shared MLP's output is multiplied by the sigmoid of this."""
    gate_up_exponents: Tensor | None = None
    """(E, 2I, hidden / 32) uint8: the scales of MXFP4 are 2 to the power of these minus 127. Both are given or
    neither."""
    down_exponents: Tensor | None = None
    """(E, hidden, I / 32) uint8."""
    scales_inputs: bool = False
    """Whether the factors multiply the experts' inputs, not their outputs."""
    scales: Tensor | None = None
    """(E,) in at least fp32: factors of the experts' outputs."""

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """``routed_by`` is the input of the router, if it is not that of the experts."""
        assert self.gate_up_exponents is None, "only kernels read codes"
        chosen, factors = self.choose(self.router(x if routed_by is None else routed_by))
        if self.scales is not None:
            factors = factors * self.scales[chosen]
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            chosen_x, factor = x[tokens], factors[tokens, places].unsqueeze(1)
            if self.scales_inputs:
                weighted = self._expert(expert)((chosen_x * factor).to(x.dtype))
            else:
                weighted = self._expert(expert)(chosen_x) * factor
            out.index_add_(0, tokens, weighted.to(x.dtype))
        return self.add_shared(x, out)

    def add_shared(self, x: Tensor, out: Tensor) -> Tensor:
        """Returns ``out`` plus the output of the MLP that every token of ``x`` runs through."""
        if self.shared is None:
            return out
        always = self.shared(x)
        return out + (always if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * always)

    def _expert(self, expert: int) -> Mlp:
        return Mlp(
            DenseLinear(self.gate_up[expert], None if self.gate_up_bias is None else self.gate_up_bias[expert]),
            DenseLinear(self.down[expert], None if self.down_bias is None else self.down_bias[expert]),
            self.activation,
        )


@dataclass(frozen=True)
class MlpBesideExperts:
    """A layer's MLP and, beside it, its experts, each with norms before and after it. Its input is not normed yet."""

    before_mlp: Layer
    mlp: Mlp
    after_mlp: Layer
    before_router: Layer
    before_experts: Layer
    experts: ExpertMlp
    after_experts: Layer
    parallel: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the whole result, not the rank's part of it."""
        return self.joined(self.mlp(self.before_mlp(x)), self.experts(self.before_experts(x), self.before_router(x)))

    def joined(self, dense: Tensor, chosen: Tensor) -> Tensor:
        """Returns the sum of the rank's outputs of the MLP and of the experts, after their norms."""
        for part in (dense, chosen):
            self.parallel.all_reduce(part)
        return self.after_mlp(dense) + self.after_experts(chosen)


@dataclass(frozen=True)
class LayerInput:
    """Adds what a layer computes from the token's input for this layer (see ``LayerInputs``)."""

    gate: Linear
    activation: Layer
    """Maps the gate's outputs and the inputs, side by side, to half as many columns."""
    projection: Linear
    norm: Layer

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """``x`` is (T, hidden), ``inputs`` (T, size)."""
        return x + self.norm(self.delta(x, inputs))

    def delta(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Returns what is added, before its norm."""
        gated: Tensor = self.activation(torch.cat((self.gate(x), inputs), dim=1))
        return self.projection(gated)


@dataclass(frozen=True)
class LayerInputTable:
    """Computes the inputs of all layers (see ``LayerInputs``)."""

    embedding: Tensor
    """(vocabulary, layers * size)."""
    projection: Linear
    norm: RmsNorm | LayerNorm
    """Its weight is (size,)."""
    embedding_scale: float
    """The factor of the embedding."""

    def __call__(self, token_ids: Tensor, x: Tensor) -> Tensor:
        """(T,) and (T, hidden) -> (T, layers, size)."""
        [size] = self.norm.weight.shape
        embedded = functional.embedding(token_ids, self.embedding) * self.embedding_scale
        projected = self.projection(x) * x.shape[1] ** -0.5
        projected = self.norm(projected.unflatten(1, (-1, size)))
        return (projected + embedded.view_as(projected)) * 2**-0.5


@dataclass(frozen=True)
class LatentProjections:
    """What latent attention needs besides the linears of the hidden state and of the output (see
    ``LatentAttention``)."""

    query_norm: RmsNorm | None
    query: Linear | None
    """Maps the latent of queries to all query heads. Both are given or neither."""
    norm: RmsNorm
    """The norm of the cached latent."""
    keys: Tensor
    """(heads, qk_nope_head_dim, kv_lora_rank): multiplied with queries from the left."""
    values: Tensor
    """(heads, v_head_dim, kv_lora_rank): multiplied with mixed latents from the right."""


class LayerState(NamedTuple):
    """What a recurrent layer knows of B rows, in at least fp32."""

    inputs: Tensor
    """(B, channels, taps - 1): the last inputs of the convolution."""
    matrices: Tensor
    """(B, heads, K, V); of size 0 if the layer has none."""


class RecurrentLayer(Protocol):
    """A recurrent mixer, between two linears."""

    @property
    def inputs(self) -> Linear:
        """The linear of the layer's input."""

    @property
    def output(self) -> Linear:
        """The linear of what ``advance`` returns."""

    def advance(self, x: Tensor, state: LayerState) -> Tensor:
        """Computes tokens one after another, and changes the state. ``x`` is (B, T, rows of the linear ``inputs``);
        returns (B, T, columns of the linear ``output``)."""


def unchanged(x: Tensor) -> Tensor:
    """Replaces a norm or a linear that a layer does not have."""
    return x


def absent(x: Tensor) -> Tensor:
    """Replaces the MLP of a layer that has none."""
    return torch.zeros_like(x)


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    recurrent: RecurrentLayer | None
    """The mixer in place of attention, whose parts are then ``unchanged``, or beside it."""
    before_attention: Layer
    """The norm of attention's input, and of the MLP's too where both see the same."""
    qkv: Linear
    """Rows: all query heads, all key heads, all value heads, and the gate if there is one; without the values if they
    are the keys, and only queries if the layer has no keys of its own."""
    qk_norm: Layer
    """The norm of queries and keys, side by side."""
    value_norm: Layer
    """The norm of values, (T, heads, head size)."""
    sinks: Tensor | None
    """(query heads,)."""
    latent: LatentProjections | None
    """With latent attention, rows of ``qkv`` are the cached vector, then all query heads or their latent."""
    output: Linear
    after_attention: Layer
    before_mlp: Layer
    mlp: Layer
    after_mlp: Layer
    inputs: LayerInput | None
    scalar: Tensor | None
    """The factor of the layer's output."""


@dataclass(frozen=True)
class Weights:
    """The whole model, or a part of its layers. Without the ends, embedding and head have no rows."""

    embedding: Tensor
    """(vocabulary, hidden)."""
    positions: Tensor | None
    """(rows, hidden): the embedding of positions."""
    layer_inputs: LayerInputTable | None
    layers: tuple[LayerWeights, ...]
    norm: RmsNorm | LayerNorm
    head: Linear
    """Only the rows that the tokenizer can use; shares the embedding's memory if they are tied."""
    num_bytes: int


def scale_of_embeddings(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Returns the factor of embeddings of ``dtype``, to which some models round it."""
    return round_to(spec.embedding_scale, dtype) if spec.rounds_embedding_scale else spec.embedding_scale


def round_to(value: float, dtype: torch.dtype) -> float:
    """Rounds a number to ``dtype``. A CUDA graph cannot capture a tensor made of a number."""
    return float(torch.tensor(value, dtype=dtype))


def num_bytes(part: Any) -> int:
    """Returns the size of the tensors in a part of the weights."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(num_bytes(item) for item in part)
    if is_dataclass(part):
        return sum(num_bytes(getattr(part, field.name)) for field in fields(part))
    return 0
