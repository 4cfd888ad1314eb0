"""Fills ``Weights`` from safetensors files, or with random numbers, and fuses and casts tensors one at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.reference.ops import (
    activate,
    choose_experts,
    choose_experts_by_sigmoid,
    clamped_gate,
    gated_activation,
)
from penstock.kernels.reference.upcast import upcast
from penstock.models.architecture.spec import BESIDE_NORMS, ModelSpec
from penstock.models.architecture.spec_parts import Activation, Experts, NormKind, QkNorm, Scoring
from penstock.models.backends.pipeline_parallel import ModelPart
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel, share
from penstock.models.backends.torch_common.fp4_experts import Fp4Experts
from penstock.models.backends.torch_common.latent import load_latent
from penstock.models.backends.torch_common.recurrent import load_recurrent
from penstock.models.backends.torch_common.sources import WHOLE, DummySource, FileSource, Part
from penstock.models.backends.torch_common.weights import (
    DenseLinear,
    ExpertMlp,
    HeadNorm,
    Layer,
    LayerInput,
    LayerInputTable,
    LayerNorm,
    LayerWeights,
    Linear,
    Mlp,
    MlpBesideExperts,
    RmsNorm,
    SharedWeights,
    SharedWholeNorm,
    Weights,
    WholeNorm,
    absent,
    num_bytes,
    round_to,
    unchanged,
)
from penstock.models.checkpoint.info import CheckpointInfo

ACTIVATION_NAMES = {kind: kind.name.lower() for kind in Activation}


@dataclass(frozen=True)
class _Filler:
    """Reads a rank's parts of a model from a source onto the device."""

    source: FileSource | DummySource
    spec: ModelSpec
    """The rank's spec."""
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel
    make_linear: "MakeLinear"
    fp4_experts: Fp4Experts | None
    """The reader of experts that stay in MXFP4."""

    def tensor(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        out = self.empty(*shape)
        self.source.fill(name, out, part)
        return out

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def mine(self, size: int) -> slice:
        """Returns the rank's ``size`` of all ranks' rows or columns."""
        return share(size * self.parallel.size, self.parallel)

    def router(self, name: str, rows: int, columns: int, biased: bool = False) -> Linear:
        """Returns a router, which is whole on every rank."""
        bias = self.tensor(f"{name}.bias", (rows,)) if biased else None
        weight = partial(self.tensor, f"{name}.weight", (rows, columns))
        return self.make_linear((), weight, bias, may_quantize=False)

    def whole(self, name: str, rows: int, columns: int) -> Linear:
        """Returns a linear without a bias that is whole on every rank."""
        weight = partial(self.tensor, f"{name}.weight", (rows, columns))
        return self.make_linear((name,), weight, None, may_quantize=True)

    def by_outputs(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool) -> Linear:
        """Returns the rank's ``rows[i]`` of each linear, stacked."""
        bias = self.stacked(self.empty(sum(rows)), "bias", names, rows) if biased else None
        stored = names if self.parallel.size == 1 else ()
        return self.make_linear(
            stored, lambda: self.stacked(self.empty(sum(rows), columns), "weight", names, rows), bias, may_quantize=True
        )

    def stacked(self, out: Tensor, kind: str, names: tuple[str, ...], rows: tuple[int, ...]) -> Tensor:
        """Fills ``out`` with the rank's ``rows[i]`` of each weight or bias."""
        for name, size, part in zip(names, rows, torch.split(out, list(rows)), strict=True):
            self.source.fill(f"{name}.{kind}", part, (self.mine(size),))
        return out

    def by_inputs(self, name: str, rows: int, columns: int, biased: bool) -> Linear:
        """Returns the rank's ``columns``. The outputs are summed over the ranks, so only rank 0 adds the bias."""
        bias = self.tensor(f"{name}.bias", (rows,)) if biased and self.parallel.rank == 0 else None
        weight = partial(self.tensor, f"{name}.weight", (rows, columns), self.inputs(columns))
        return self.make_linear((name,) if self.parallel.size == 1 else (), weight, bias, may_quantize=True)

    def inputs(self, columns: int) -> Part:
        """Returns the rank's part of a weight that is divided by inputs."""
        return slice(None), self.mine(columns)

    def norm(self, name: str) -> RmsNorm | LayerNorm:
        """Returns a norm of hidden states. Its weight is in at least fp32, since 16 bits may lose what the offset
        adds."""
        size, parts = (self.spec.hidden_size,), self.spec.norm_parts
        weight = self.norm_part(f"{name}.weight", size) if "weight" in parts else self.empty_norm(size).fill_(1.0)
        return self.norm_of(weight, self.norm_part(f"{name}.bias", size) if "bias" in parts else None)

    def norm_of(self, weight: Tensor, bias: Tensor | None = None) -> RmsNorm | LayerNorm:
        """Returns a norm of the model's kind. ``weight`` is the checkpoint's, and changed."""
        weight.add_(self.spec.norm_offset)
        eps = self.spec.norm_eps
        return RmsNorm(weight, eps) if self.spec.norm_kind is NormKind.RMS else LayerNorm(weight, bias, eps)

    def norm_part(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
        out = self.empty_norm(shape)
        self.source.fill(name, out, part)
        return out

    def empty_norm(self, shape: tuple[int, ...]) -> Tensor:
        return upcast(self.empty(*shape))


class MakeLinear(Protocol):
    """Makes a backend's linears, except for experts."""

    def __call__(
        self, stored: tuple[str, ...], weight: Callable[[], Tensor], bias: Tensor | None, *, may_quantize: bool
    ) -> Linear:
        """Makes one linear of stacked matrices, which ``weight`` returns dequantised. ``stored`` has their names in the
        checkpoint; it is empty for parts of matrices and, without ``may_quantize``, for heads and routers."""


def _dense(stored: tuple[str, ...], weight: Callable[[], Tensor], bias: Tensor | None, **_: bool) -> Linear:
    return DenseLinear(weight(), bias)


def load_weights(
    info: CheckpointInfo,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    num_logits: int,
    parallel: TensorParallel = ALONE,
    make_linear: "MakeLinear | None" = None,
    shared: SharedWeights | None = None,
    keeps_fp4: bool = False,
    part: ModelPart | None = None,
) -> Weights:
    """Loads a checked checkpoint, or a rank's part of it according to ``info.spec.divided``. ``num_logits`` is the
    number of the head's first rows that are used; a rank has its ``share`` of them. ``shared`` weights are another
    model's, and replace the checkpoint's. ``keeps_fp4``: the experts stay in MXFP4; see ``has_fp4_experts``. ``part``:
    only that of a rank of a model in stages, where rank 0 has the whole head."""
    spec = info.spec.divided(parallel.size)
    source: FileSource | DummySource = DummySource(info, device) if load_format == "dummy" else FileSource(info)
    fp4_experts = Fp4Experts(info, spec, device, parallel) if keeps_fp4 else None
    fill = _Filler(source, spec, dtype, device, parallel, make_linear or _dense, fp4_experts)
    numbers = range(spec.num_layers) if part is None else part.layers
    layers = tuple(_load_layer(replace(fill, spec=spec.at(layer)), layer) for layer in numbers)
    norm = fill.norm("model.norm")
    if part is not None and not part.has_ends:
        nothing = fill.empty(0, spec.hidden_size)
        return Weights(nothing, None, None, layers, norm, DenseLinear(nothing), num_bytes((layers, norm)))
    embedding = None if shared is None else shared.embedding
    if embedding is None:
        embedding = fill.tensor("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    table = spec.position_table
    positions = fill.tensor("model.embed_positions.weight", (table.num_rows, spec.hidden_size)) if table else None
    layer_inputs = _load_layer_inputs(fill)
    head, untied = (None, None) if shared is None else (shared.head, None)
    if head is None:
        head, untied = _load_head(fill, embedding, share(num_logits, parallel if part is None else ALONE))
    total = num_bytes((embedding, positions, layer_inputs, layers, norm, untied))
    return Weights(embedding, positions, layer_inputs, layers, norm, head, total)


def _load_head(fill: _Filler, embedding: Tensor, rows: slice) -> tuple[Linear, Tensor | None]:
    """Returns the output head of these rows, and its matrix if it is not the embedding's."""
    spec, untied = fill.spec, None
    if not spec.tied_embeddings:
        untied = fill.tensor("lm_head.weight", (rows.stop - rows.start, spec.hidden_size), (rows,))
    weight = embedding[rows] if untied is None else untied
    bias = fill.tensor("lm_head.bias", (rows.stop - rows.start,), (rows,)) if spec.head_bias else None
    return fill.make_linear((), lambda: weight, bias, may_quantize=False), untied


def _load_layer_inputs(fill: _Filler) -> LayerInputTable | None:
    spec, inputs = fill.spec, fill.spec.layer_inputs
    if inputs is None:
        return None
    columns = spec.num_layers * inputs.size
    embedding = fill.tensor("model.embed_tokens_per_layer.weight", (inputs.vocab_size, columns))
    return LayerInputTable(
        embedding,
        fill.whole("model.per_layer_model_projection", columns, spec.hidden_size),
        fill.norm_of(fill.norm_part("model.per_layer_projection_norm.weight", (inputs.size,))),
        round_to(math.sqrt(inputs.size), embedding.dtype),
    )


def _load_layer(fill: _Filler, layer: int) -> LayerWeights:
    """Loads a layer; the filler's spec has its sizes."""
    spec = fill.spec
    hidden = spec.hidden_size
    prefix = f"model.layers.{layer}."
    attention = f"{prefix}self_attn."
    mixer, qkv = spec.recurrent[layer], spec.qkv_rows(layer)
    attends = spec.attends(layer)
    qkv_names = tuple(f"{attention}{name}" for name in qkv)
    before_attention, after_attention, before_mlp, after_mlp = (
        unchanged if name is None else fill.norm(prefix + name) for name in spec.norms_of(layer)
    )
    return LayerWeights(
        before_attention=before_attention,
        recurrent=None if mixer is None else load_recurrent(fill, mixer, prefix),
        qkv=fill.by_outputs(qkv_names, tuple(qkv.values()), spec.qkv_columns, spec.qkv_bias) if attends else unchanged,
        qk_norm=_load_qk_norm(fill, attention, spec.has_kv(layer)) if attends and spec.norms_qk(layer) else unchanged,
        value_norm=RmsNorm(fill.empty_norm((spec.head_dim,)).fill_(1.0), spec.norm_eps)
        if spec.value_norm
        else unchanged,
        sinks=fill.tensor(f"{attention}sinks", (spec.num_heads,), (fill.mine(spec.num_heads),)) if spec.sinks else None,
        latent=load_latent(spec.latent, spec.num_heads, attention, fill) if spec.latent is not None else None,
        output=fill.by_inputs(f"{attention}o_proj", hidden, spec.output_columns, spec.output_bias)
        if attends
        else unchanged,
        after_attention=after_attention,
        before_mlp=unchanged if spec.experts is not None and spec.experts.beside_mlp else before_mlp,
        mlp=_load_feed_forward(fill, prefix, layer, before_mlp) if spec.has_mlp(layer) else absent,
        after_mlp=after_mlp,
        inputs=_load_layer_input(fill, prefix),
        scalar=fill.tensor(f"{prefix}layer_scalar", (1,)) if spec.layer_scalars else None,
    )


def _load_feed_forward(fill: _Filler, prefix: str, layer: int, before_mlp: Layer) -> Layer:
    """Loads the MLP, the experts or both. ``before_mlp`` is the norm of the MLP's input."""
    spec = fill.spec
    if spec.experts is None or not spec.has_experts(layer):
        return _load_mlp(fill, f"{prefix}mlp.", spec.intermediate_size, spec.mlp_bias, spec.gated_mlp)
    experts = _load_experts(fill, f"{prefix}mlp.")
    if not spec.experts.beside_mlp:
        return experts
    mlp = _load_mlp(fill, f"{prefix}mlp.", spec.intermediate_size, spec.mlp_bias, spec.gated_mlp)
    gate_norm, experts_norm, experts_post_norm, dense_post_norm = (fill.norm(prefix + name) for name in BESIDE_NORMS)
    gate_norm.weight.mul_(spec.hidden_size**-0.5)
    return MlpBesideExperts(
        before_mlp, mlp, dense_post_norm, gate_norm, experts_norm, experts, experts_post_norm, fill.parallel
    )


def _load_layer_input(fill: _Filler, prefix: str) -> LayerInput | None:
    spec, inputs = fill.spec, fill.spec.layer_inputs
    if inputs is None:
        return None
    return LayerInput(
        fill.whole(f"{prefix}per_layer_input_gate", inputs.size, spec.hidden_size),
        partial(gated_activation, activation=ACTIVATION_NAMES[spec.activation]),
        fill.whole(f"{prefix}per_layer_projection", spec.hidden_size, inputs.size),
        fill.norm(f"{prefix}post_per_layer_input_norm"),
    )


def _load_qk_norm(fill: _Filler, prefix: str, has_keys: bool) -> Layer:
    spec = fill.spec
    if not has_keys:
        assert spec.qk_norm is QkNorm.HEAD, "the only norm that layers without keys have"
        query = fill.norm_part(f"{prefix}q_norm.weight", spec.qk_norm_shapes[0])
        return HeadNorm(fill.norm_of(query.repeat(spec.num_heads, 1)))
    if spec.qk_norm is QkNorm.UNWEIGHTED:
        return HeadNorm(fill.norm_of(fill.empty_norm((spec.num_heads + spec.num_kv_heads, spec.head_dim)).fill_(1.0)))
    query, key = (
        fill.norm_part(
            f"{prefix}{name}.weight", shape, WHOLE if spec.qk_norm is QkNorm.HEAD else (fill.mine(shape[0]),)
        )
        for name, shape in zip(("q_norm", "k_norm"), spec.qk_norm_shapes, strict=True)
    )
    if spec.qk_norm is not QkNorm.ALL:
        # One matrix with a row per head, so that queries and keys are normed together.
        return HeadNorm(fill.norm_of(torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))))
    norms = RmsNorm(query.add_(spec.norm_offset), spec.norm_eps), RmsNorm(key.add_(spec.norm_offset), spec.norm_eps)
    return WholeNorm(*norms) if fill.parallel.size == 1 else SharedWholeNorm(*norms, fill.parallel)


def _load_mlp(fill: _Filler, prefix: str, inner: int, biased: bool, gated: bool = True) -> Mlp:
    hidden = fill.spec.hidden_size
    names = (f"{prefix}gate_proj", f"{prefix}up_proj") if gated else (f"{prefix}up_proj",)
    return Mlp(
        gate_up=fill.by_outputs(names, (inner,) * len(names), hidden, biased),
        down=fill.by_inputs(f"{prefix}down_proj", hidden, inner, biased),
        activation=_activation(fill.spec),
    )


def _activation(spec: ModelSpec) -> Layer:
    return partial(gated_activation if spec.gated_mlp else activate, activation=ACTIVATION_NAMES[spec.activation])


def _load_experts(fill: _Filler, prefix: str) -> ExpertMlp:
    spec, experts = fill.spec, fill.spec.experts
    assert experts is not None
    activation: Layer = _activation(spec)
    if experts.gate is not None:
        activation = partial(clamped_gate, alpha=experts.gate.alpha, limit=experts.gate.limit)
    num, hidden, inner = experts.num_experts, spec.hidden_size, experts.intermediate_size
    halves = ("gate_proj", "up_proj") if spec.gated_mlp else ("up_proj",)
    sizes = (inner,) * len(halves)
    gate_up_exponents, down_exponents = None, None
    if fill.fp4_experts is not None:
        gate_up, gate_up_exponents = fill.fp4_experts.gate_up(prefix)
        down, down_exponents = fill.fp4_experts.down(prefix)
    else:
        gate_up, down = fill.empty(num, sum(sizes), hidden), fill.empty(num, hidden, inner)
    gate_up_bias = fill.empty(num, sum(sizes)) if experts.biased else None
    # The ranks' outputs are summed, so only rank 0 adds the bias.
    down_bias = fill.empty(num, hidden).zero_() if experts.biased else None
    for expert in range(num):
        name = f"{prefix}experts.{expert}."
        names = tuple(name + half for half in halves)
        if fill.fp4_experts is None:
            fill.stacked(gate_up[expert], "weight", names, sizes)
            fill.source.fill(f"{name}down_proj.weight", down[expert], fill.inputs(inner))
        if gate_up_bias is not None:
            fill.stacked(gate_up_bias[expert], "bias", names, sizes)
        if down_bias is not None and fill.parallel.rank == 0:
            fill.source.fill(f"{name}down_proj.bias", down_bias[expert])
    shared = experts.shared_size
    return ExpertMlp(
        router=fill.router(f"{prefix}gate", num, hidden, experts.biased),
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
        choose=_choice(fill, f"{prefix}gate.e_score_correction_bias", experts),
        shared=_load_mlp(fill, f"{prefix}shared_expert.", shared, experts.biased, spec.gated_mlp) if shared else None,
        shared_gate=fill.router(f"{prefix}shared_expert_gate", 1, hidden) if experts.shared_gated else None,
        gate_up_exponents=gate_up_exponents,
        down_exponents=down_exponents,
        scales_inputs=experts.scales_inputs,
        scales=fill.norm_part(f"{prefix}gate.per_expert_scale", (num,)) if experts.beside_mlp else None,
    )


def _choice(fill: _Filler, bias: str, experts: Experts) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns the choice of a layer's experts. ``bias`` is the name of its bias."""
    choose: Callable[..., tuple[Tensor, Tensor]] = choose_experts
    if experts.scoring is Scoring.SIGMOID:
        by = fill.norm_part(bias, (experts.num_experts,)) if experts.selection_bias else None
        choose = partial(choose_experts_by_sigmoid, bias=by)
    return partial(
        choose,
        num_chosen=experts.per_token,
        num_groups=experts.num_groups,
        groups_chosen=experts.groups_per_token,
        normalise=experts.normalise,
        scale=experts.scale,
    )
