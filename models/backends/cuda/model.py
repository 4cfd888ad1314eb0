"""A model's layers on the CUDA kernels, from a step's tokens to their hidden states. The linears compute the products.

Nothing here waits for the device or reads from it, so that a CUDA graph can capture all of it. A library that computes
attention may have to.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.activation import gated_activation
from penstock.kernels.cuda.attention.common import PagedKV, RaggedRows
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace, fused_moe
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.kernels.cuda.norm import add_rms_norm, rms_norm
from penstock.kernels.cuda.recurrent.rows import RecurrentRows
from penstock.kernels.cuda.rope_kv import rope_kv
from penstock.kernels.cuda.step import StepTensors
from penstock.kernels.reference.ops import rotate, soft_cap
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import NormKind, NoRope, QkNorm
from penstock.models.backends.cuda.attention import ModelAttention, StepAttention
from penstock.models.backends.cuda.latent import expand_latents, write_latents
from penstock.models.backends.cuda.linear import CudaLinears, SkinnyLinear
from penstock.models.backends.cuda.recurrent import RecurrentLayers, RecurrentStep
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.backends.torch_common.adapters import LoraLinear
from penstock.models.backends.torch_common.loader import ACTIVATION_NAMES
from penstock.models.backends.torch_common.rope_tables import cos_sin_tables, query_scales
from penstock.models.backends.torch_common.weights import (
    ExpertMlp,
    HeadNorm,
    Layer,
    LayerWeights,
    Mlp,
    MlpBesideExperts,
    RmsNorm,
    SharedWholeNorm,
    Weights,
    WholeNorm,
    scale_of_embeddings,
    unchanged,
)


class Hidden(NamedTuple):
    """The result of a model's layers."""

    states: Tensor
    """(T, hidden), after the last norm."""
    features: Tensor
    """(T, feature layers, hidden): the inputs of these layers, and the states for the number of layers."""
    kept: list[Tensor]
    """What the recurrent layers need to advance their states by tokens that were not certain; see ``RecurrentStep``."""


class TokenPlaces(NamedTuple):
    """A step's T tokens, as layers see them. See ``StepTensors``."""

    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    states: RecurrentStep | None = None
    """None without recurrent layers."""


class CudaModel:
    """The layers of one model, or some of them, on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        pages: Sequence[Tensor | None],
        shape: ModelShape,
        parallel: TensorParallel,
        linears: CudaLinears,
        attention: ModelAttention,
        feature_layers: tuple[int, ...] = (),
        kv_scales: Sequence[Tensor] | None = None,
        part: ModelPart | None = None,
        recurrent: RecurrentLayers | None = None,
    ) -> None:
        """Everything is the rank's part. ``pages`` are those that each layer attends to, (pages, 2, K, 16, D), or of
        latents (pages, 1, 1, 16, D), if any. ``kv_scales``, for pages in fp8, has (2, K) in fp32 for each layer: the
        scales of the keys and of the values that it attends to; None: all are 1. ``part``: the rank's of a model in
        stages, where rank 0 has the whole head."""
        self._spec = spec
        self._feature_layers = feature_layers
        self._parallel = parallel
        self._head_parallel = parallel if part is None else ALONE
        self._layers = range(spec.num_layers) if part is None else part.layers
        self._linears = linears
        self.num_logits = shape.num_logits or shape.vocab_size
        self._weights = weights
        self.embedding, self.head = weights.embedding, weights.head
        self.device = weights.embedding.device
        self._dtype = weights.embedding.dtype
        self._embedding_scale = scale_of_embeddings(spec, self._dtype)
        self._specs = [spec.at(layer) for layer in range(spec.num_layers)]
        """The spec with each layer's sizes."""
        rotations = set(spec.rotations)
        if spec.qk_norm_is_last:
            rotations.add((NoRope(), spec.rotary_dim))
        self._cos_sin_tables = {
            (rope, rotary_dim): cos_sin_tables(rope, rotary_dim, shape.max_pages * shape.slots, self.device)
            for rope, rotary_dim in rotations
        }
        self._attention = attention
        self._recurrent = recurrent
        self._latent = shape.latent
        self._mixture: tuple[ExpertsShape, ExpertsWorkspace] | None = None
        if shape.experts is not None:
            experts = ExpertsShape.of(shape)
            self._mixture = experts, ExpertsWorkspace.allocate(experts, shape.max_tokens, self.device)
            _fold_expert_scales(weights)
        none = torch.full((spec.num_heads,), -torch.inf, dtype=torch.float32, device=self.device)
        if kv_scales is None:
            counts = [self._specs[index].num_kv_heads for index in self._layers]
            kv_scales = [torch.ones(2, count, dtype=torch.float32, device=self.device) for count in counts]
        self._kv = {
            # Copies, since kernels need addresses that are aligned.
            index: PagedKV(
                page, scales[0].clone(), scales[1].clone(), none if layer.sinks is None else layer.sinks.float()
            )
            for index, page, scales, layer in zip(self._layers, pages, kv_scales, weights.layers, strict=True)
            if page is not None
        }

    def forward(
        self, step: StepTensors, rows: RaggedRows, longest: int, row_states: RecurrentStep | None = None
    ) -> Hidden:
        """Runs the layers, which write the KV of every token with a slot. No sequence has over ``longest`` tokens."""
        x = self.embed(step.token_ids, step.positions)
        weights, num_layers = self._weights, self._spec.num_layers
        inputs = None if weights.layer_inputs is None else weights.layer_inputs(step.token_ids, x)
        features = x.new_empty(len(x), len(self._feature_layers), self._spec.hidden_size)
        places = TokenPlaces(step.positions, step.slots, step.query_starts, row_states)
        delta, after = self._run_layers(x, places, rows, longest, inputs, features)
        states = self._normed(x, delta, after, weights.norm)
        if num_layers in self._feature_layers:
            features[:, self._feature_layers.index(num_layers)] = states
        return Hidden(states, features, [] if row_states is None else row_states.kept)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns the input of the first layer, (T, hidden)."""
        spec, weights = self._spec, self._weights
        x = functional.embedding(token_ids, weights.embedding)
        if spec.embedding_scale != 1.0:
            x = x * self._embedding_scale
        if spec.position_table is not None and weights.positions is not None:
            # Tokens that pad a graph may have positions past the table.
            places = (positions + spec.position_table.offset).clamp(max=spec.position_table.num_rows - 1)
            x = x + functional.embedding(places, weights.positions)
        return x

    def run_layers(self, x: Tensor, places: TokenPlaces, rows: RaggedRows, longest: int) -> None:
        """Runs a stage's layers on (T, hidden), in place. They have neither inputs of their own nor features."""
        delta, after = self._run_layers(x, places, rows, longest, None, x.new_empty(len(x), 0, x.shape[1]))
        self._normed(x, delta, after, unchanged)

    def final_norm(self, x: Tensor) -> Tensor:
        """(N, hidden) -> (N, hidden)."""
        return self._normed(x, None, None, self._weights.norm)

    def _run_layers(
        self, x: Tensor, places: TokenPlaces, rows: RaggedRows, longest: int, inputs: Tensor | None, features: Tensor
    ) -> tuple[Tensor | None, Layer | None]:
        """Runs the layers on ``x`` (T, hidden), in place. Returns what is still to be added to it, and the norm of
        that. ``inputs`` (T, layers, size) are those that layers have of their own; writes ``features``."""
        spec, weights = self._spec, self._weights
        attend = self._attention.plan(rows, longest)
        head_dims = {sizes.head_dim for sizes in self._specs}
        queries = {head_dim: x.new_empty(len(x), spec.num_heads, head_dim) for head_dim in head_dims}
        # Attention writes nothing for tokens without a sequence, which pad a graph: their zeros remain.
        mixed_dims = {head_dim: head_dim if self._latent is None else self._latent.kv_lora_rank for head_dim in queries}
        outputs = {head_dim: x.new_zeros(len(x), spec.num_heads, mixed_dims[head_dim]) for head_dim in queries}
        delta: Tensor | None = None
        after: Layer | None = None
        for index, layer in zip(self._layers, weights.layers, strict=True):
            has_mixer, head_dim = spec.has_mixer(index), self._specs[index].head_dim
            y = self._normed(x, delta, after, layer.before_attention if has_mixer else layer.before_mlp)
            if index in self._feature_layers:
                features[:, self._feature_layers.index(index)] = x
            out = y  # replaced: every layer has a mixer or an MLP
            if layer.recurrent is not None:
                assert self._recurrent is not None
                assert places.states is not None
                out, after = self._recurrent.mix(index, y, places.states, longest), layer.after_attention
            if spec.attends(index):
                attended = self._attend(index, layer, y, places, attend, queries[head_dim], outputs[head_dim])
                out = attended if layer.recurrent is None else out + attended
                after = layer.after_attention
            if spec.is_parallel:
                y = y if layer.before_mlp is unchanged else layer.before_mlp(x)
                out, after = out + self._mlp(layer.mlp, y, places.query_starts), layer.after_mlp
            elif spec.has_mlp(index):
                if has_mixer:
                    self._parallel.all_reduce(out)
                    y = self._normed(x, out, after, layer.before_mlp)
                out, after = self._mlp(layer.mlp, y, places.query_starts), layer.after_mlp
            if not isinstance(layer.mlp, MlpBesideExperts):
                self._parallel.all_reduce(out)
            delta = out
            if layer.inputs is not None or layer.scalar is not None:
                self._end_layer(layer, x, out, None if inputs is None else inputs[:, index])
                delta, after = None, None
        return delta, after

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, places: TokenPlaces, attend: StepAttention, query: Tensor,
        mixed: Tensor,
    ) -> Tensor:  # fmt: skip
        """Computes a layer's attention and output projection, (T, hidden) -> (T, hidden). ``query`` and ``mixed``, (T,
        H, D), are room; ``mixed`` is 0 for tokens without a sequence."""
        gate = self._write_kv(index, layer, x, places.positions, places.slots, query)
        attend(self._spec.windows[index], query, self._kv[index], mixed)
        joined = mixed.flatten(1) if layer.latent is None else expand_latents(layer.latent, mixed)
        return layer.output(joined if gate is None else joined * torch.sigmoid(gate))

    def commit_states(self, kept: Sequence[Tensor], rows: RecurrentRows) -> None:
        """Advances the recurrent states by tokens that were not certain in ``forward``, which kept their inputs."""
        assert self._recurrent is not None, "a model without recurrent layers has no states"
        self._recurrent.commit(kept, rows)

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can capture ``forward``."""
        return self._attention.can_be_captured

    def measure_products(self, max_tokens: int) -> None:
        """Chooses the fastest products where the GPU decides which they are. Waits for the device."""
        if self.device.type == "cuda":
            self._linears.measure(max_tokens)

    def changes(self) -> list[int]:
        """Returns the numbers of tokens of a step from which different kernels run."""
        of_experts = [] if self._mixture is None else self._mixture[0].changes()
        of_scans = [] if self._recurrent is None else self._recurrent.changes()
        return of_experts + of_scans + self._linears.changes()

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, hidden) -> (N, tokenizer's vocabulary): in the model's dtype, or in fp32 if they are capped."""
        logits = self._head_parallel.gather_columns(self._weights.head(hidden), self.num_logits)
        if self._spec.logit_scale != 1.0:
            logits = logits * self._spec.logit_scale
        cap = self._spec.logit_soft_cap
        return logits if cap is None else soft_cap(upcast(logits), cap)

    def _normed(self, x: Tensor, delta: Tensor | None, after: Layer | None, before: Layer) -> Tensor:
        """Computes x += after(delta) in place; returns before(x). Either may be absent."""
        if self._spec.norm_kind is not NormKind.RMS:
            if delta is not None:
                x += delta if after is None else after(delta)
            return before(x)
        weight = before.weight if isinstance(before, RmsNorm) else None
        if delta is None:
            if weight is None:
                return x
            y = torch.empty_like(x)
            rms_norm(x, weight, self._spec.norm_eps, y)
            return y
        y = x if weight is None else torch.empty_like(x)
        delta_weight = after.weight if isinstance(after, RmsNorm) else None
        written = None if weight is None else y
        add_rms_norm(x, delta, self._spec.norm_eps, weight=weight, y=written, delta_weight=delta_weight)
        return y

    def _end_layer(self, layer: LayerWeights, x: Tensor, delta: Tensor, inputs: Tensor | None) -> None:
        """Computes the rest of a layer that changes its output after the MLP's is added, in place."""
        self._normed(x, delta, layer.after_mlp, unchanged)
        if layer.inputs is not None and inputs is not None:
            self._normed(x, layer.inputs.delta(x, inputs), layer.inputs.norm, unchanged)
        if layer.scalar is not None:
            x *= layer.scalar

    def _write_kv(
        self, index: int, layer: LayerWeights, x: Tensor, positions: Tensor, slots: Tensor, query: Tensor
    ) -> Tensor | None:
        """Computes queries (T, H, D), and writes keys and values, or latents, to their pages. Returns the gate, if
        there is one."""
        spec, kv = self._specs[index], self._kv[index]
        has_kv = spec.has_kv(index)
        qkv: Tensor = layer.qkv(x)
        gate: Tensor | None = None
        if spec.gated_attention:
            qkv, gate = qkv[:, : -spec.query_size].contiguous(), qkv[:, -spec.query_size :]
        tables = self._cos_sin_tables[spec.ropes[index], spec.rotary_dim]
        if self._latent is not None and layer.latent is not None:
            write_latents(self._latent, layer.latent, qkv, tables, positions, slots, query, kv.pages)
            return None
        rotated = qkv[:, : spec.query_size + spec.kv_size]
        norm = None
        match layer.qk_norm:
            case HeadNorm(RmsNorm(weight, eps)) if spec.qk_norm is QkNorm.HEAD and not spec.qk_norm_is_last:
                norm = (weight[0], weight[-1], eps)
            case HeadNorm() as norm_of_heads if spec.qk_norm_is_last:
                # Rotated and normed here, so that the kernel only stores them.
                heads = rotate(rotated.view(len(rotated), -1, spec.head_dim), *(table[positions] for table in tables))
                rotated.copy_(norm_of_heads(heads.flatten(1)))
                tables = self._cos_sin_tables[NoRope(), spec.rotary_dim]
            case HeadNorm() as norm_of_heads:
                rotated.copy_(norm_of_heads(rotated))
            case WholeNorm(query_norm, key_norm):
                queries, keys = qkv[:, : spec.query_size], qkv[:, spec.query_size : spec.query_size + spec.kv_size]
                rms_norm(queries, query_norm.weight, query_norm.eps, queries)
                rms_norm(keys, key_norm.weight, key_norm.eps, keys)
            case SharedWholeNorm() as norm_of_all:
                rotated.copy_(norm_of_all(rotated))
            case _:
                pass
        rope_kv(
            qkv,
            *tables,
            positions,
            slots,
            query,
            kv.pages if has_kv else None,
            norm=norm,
            scales=(kv.key_scales, kv.value_scales) if has_kv and kv.pages.dtype == torch.float8_e4m3fn else None,
            value_eps=spec.norm_eps if has_kv and spec.value_norm else None,
            values_are_keys=has_kv and spec.values_are_keys(index),
        )
        if spec.query_scaling is not None and spec.scales_queries(index):
            query *= query_scales(spec.query_scaling, positions)[:, None, None].to(query.dtype)
        return gate

    def _mlp(self, mlp: Layer, x: Tensor, query_starts: Tensor) -> Tensor:
        """(T, hidden) -> (T, hidden)."""
        if isinstance(mlp, ExpertMlp):
            return self._experts(mlp, x, query_starts)
        if isinstance(mlp, MlpBesideExperts):
            before_mlp, before_experts, before_router = (
                self._normed(x, None, None, norm) for norm in (mlp.before_mlp, mlp.before_experts, mlp.before_router)
            )
            chosen = self._experts(mlp.experts, before_experts, query_starts, before_router)
            return mlp.joined(self._mlp(mlp.mlp, before_mlp, query_starts), chosen)
        assert isinstance(mlp, Mlp)
        if not self._spec.gated_mlp:
            return mlp(x)
        activation = ACTIVATION_NAMES[self._spec.activation]
        linear = mlp.gate_up
        if isinstance(linear, LoraLinear) and not linear.adapters.is_active:
            linear = linear.base
        if isinstance(linear, SkinnyLinear) and linear.computes(x):
            return mlp.down(linear.gated(x, activation))
        gate_up: Tensor = linear(x)
        inner = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        gated_activation(gate_up, activation, inner)
        return mlp.down(inner)

    def _experts(self, mlp: ExpertMlp, x: Tensor, query_starts: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """(T, hidden) -> (T, hidden). ``routed_by`` is the input of the router, if it is not that of the experts."""
        assert self._mixture is not None
        shape, room = self._mixture
        weights = ExpertsWeights(
            mlp.gate_up, mlp.down, mlp.gate_up_bias, mlp.down_bias, mlp.gate_up_exponents, mlp.down_exponents
        )
        out = torch.zeros_like(x)  # tokens without a sequence get nothing
        logits, factor = self._route(mlp, x if routed_by is None else routed_by)
        if factor is None:
            fused_moe(shape, x, logits, weights, query_starts, room, out)
        elif mlp.scales_inputs:
            fused_moe(shape, x * factor, logits, weights, query_starts, room, out)
        else:
            fused_moe(shape, x, logits, weights, query_starts, room, out)
            out *= factor
        return mlp.add_shared(x, out)

    def _route(self, mlp: ExpertMlp, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns logits (T, E) whose softmax over the largest ones is that of the experts' factors, and what the
        experts' sum, or their input, has to be multiplied by."""
        logits: Tensor = mlp.router(x)
        assert self._spec.experts is not None
        if self._spec.experts.is_plain_softmax:
            return logits, None
        chosen, factors = mlp.choose(logits)
        total = factors.sum(-1, keepdim=True)
        least = torch.finfo(logits.dtype).min
        # Sigmoids may all be zero.
        tiny = torch.finfo(factors.dtype).tiny
        shares = (factors / total.clamp(min=tiny)).clamp(min=tiny).log()
        routed = torch.full_like(logits, least).scatter_(-1, chosen, shares.to(logits.dtype))
        return routed, total.to(x.dtype)


def _fold_expert_scales(weights: Weights) -> None:
    """Multiplies the experts' outputs by their factors, which the kernels do not have."""
    for layer in weights.layers:
        if isinstance(layer.mlp, MlpBesideExperts) and layer.mlp.experts.scales is not None:
            # In place: the KV cache is allocated by now, and a copy in fp32 may not fit beside it.
            layer.mlp.experts.down.mul_(layer.mlp.experts.scales[:, None, None])
