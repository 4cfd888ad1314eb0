"""The properties of a loaded model that its kernels are compiled for."""

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from penstock.kernels.cuda.core.launch import active_capability, has_wide_products
from penstock.kernels.cuda.latent_kv import LatentShape
from penstock.kernels.cuda.model_shapes import Mixture, ModelShape
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import (
    LATENT_NORM_EPS,
    Experts,
    LatentAttention,
    NormKind,
    NormPlacement,
    QkNorm,
)
from penstock.models.backends.cuda.recurrent import recurrent_shape
from penstock.models.backends.cuda.steps.states import slot_floats
from penstock.models.backends.torch_common.loader import ACTIVATION_NAMES
from penstock.scheduler.worker_config import MAX_FORCED_DRAFTS, MAX_PREDICTED_DRAFTS, WorkerConfig


def shape_of(
    spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype, num_logits: int, max_model_len: int, max_num_seqs: int,
    max_tokens: int, *, deterministic: bool, max_drafts: int = 0, has_fp4_experts: bool = False,
    num_window_groups: int = 0,
) -> ModelShape:  # fmt: skip
    """Returns the shape whose ``ahead.variants`` the backend launches."""
    experts, inputs = spec.experts, spec.layer_inputs
    is_beside = experts is not None and experts.beside_mlp
    has_mlp = spec.gated_mlp and (experts is None or is_beside or not all(experts.layers))
    # Other norms are computed in plain torch.
    has_norms = spec.norm_kind is NormKind.RMS
    norms_heads = has_norms and spec.qk_norm is QkNorm.HEAD and not spec.qk_norm_is_last
    shape = ModelShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size if has_mlp else None,
        clamped_gate=None if experts is None or experts.gate is None else (experts.gate.alpha, experts.gate.limit),
        experts=None if experts is None else _mixture(experts),
        expert_size=0 if experts is None else experts.intermediate_size,
        shared_size=0 if experts is None else experts.shared_size,
        has_fp4_experts=has_fp4_experts,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary_dim,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        qkv_bias=spec.qkv_bias,
        gated_attention=spec.gated_attention,
        output_bias=spec.output_bias,
        mlp_bias=spec.mlp_bias,
        norms_before=has_norms and spec.norm_placement is not NormPlacement.POST,
        norms_after=has_norms and spec.norm_placement in (NormPlacement.POST, NormPlacement.BOTH),
        norms_heads=norms_heads,
        norms_queries=spec.qk_norm is QkNorm.ALL,
        activation=ACTIVATION_NAMES[spec.activation],
        gated_mlp=spec.gated_mlp,
        norms_values=spec.value_norm,
        input_size=0 if inputs is None else inputs.size,
        inputs_of_layers=0 if inputs is None else inputs.size * spec.num_layers,
        ends_layers=inputs is not None or spec.layer_scalars,
        has_mlp_beside_experts=is_beside,
        recurrent=tuple(dict.fromkeys(_recurrent_shapes(spec, dtype))),
        latent=None if spec.latent is None else _latent_shape(spec.latent),
        windows=tuple(dict.fromkeys(spec.windows)),
        chunked_windows=spec.chunked_windows,
        attention_scale=spec.attention_scale,
        cap=spec.attention_soft_cap,
        dtype=dtype,
        kv_dtype=kv_dtype,
        num_logits=num_logits,
        logits_dtype=logits_dtype(spec, dtype),
        max_positions=max_model_len,
        max_sequences=max_num_seqs,
        max_tokens=max_tokens,
        max_drafts=max_drafts,
        deterministic=deterministic,
        num_window_groups=num_window_groups,
        wide_products=has_wide_products(active_capability()),
    )
    return _with_kinds(spec, shape)


def _with_kinds(spec: ModelSpec, shape: ModelShape) -> ModelShape:
    """Returns the shape with the sizes of the layers that have attention."""
    attending = filter(spec.attends, range(spec.num_layers))
    first, *others = dict.fromkeys(_kind_of(spec, layer, shape) for layer in attending)
    # Kinds that differ only in their window are one.
    kinds: dict[ModelShape, tuple[int | None, ...]] = {replace(kind, windows=()): () for kind in (first, *others)}
    for kind in (first, *others):
        kinds[replace(kind, windows=())] += kind.windows
    first, *others = (replace(kind, windows=windows) for kind, windows in kinds.items())
    return replace(first, others=tuple(others))


def _kind_of(spec: ModelSpec, layer: int, shape: ModelShape) -> ModelShape:
    """Returns the shape of a model of layers like this one."""
    sizes = spec.at(layer)
    return replace(
        shape,
        intermediate_size=None if shape.intermediate_size is None else sizes.intermediate_size,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rotary_dim=sizes.rotary_dim,
        has_kv=spec.has_kv(layer),
        values_are_keys=spec.values_are_keys(layer),
        windows=(spec.windows[layer],),
    )


def _recurrent_shapes(spec: ModelSpec, dtype: torch.dtype) -> Iterator[RecurrentShape]:
    stride = slot_floats(spec)
    for mixer in spec.recurrent:
        if mixer is not None:
            yield recurrent_shape(mixer, spec.hidden_size, dtype, stride)


def max_drafts(config: WorkerConfig) -> int:
    """Returns the maximum number of drafts of a row in a step, whether a drafter proposes them, a caller predicts them
    or a grammar forces them."""
    proposed = 0 if config.speculation is None else config.speculation.num_speculative_tokens
    predicted = MAX_PREDICTED_DRAFTS if config.drafts_predictions else 0
    forced = 0 if config.tokenizer is None else MAX_FORCED_DRAFTS
    return max(proposed, predicted, forced)


def _latent_shape(latent: LatentAttention) -> LatentShape:
    sizes = asdict(latent)
    del sizes["splits_kv"]  # which only concerns the file
    return LatentShape(**sizes, norm_eps=LATENT_NORM_EPS)


def _mixture(experts: Experts) -> Mixture:
    return Mixture(
        num_experts=experts.num_experts,
        per_token=experts.per_token,
        normalise=experts.normalise or not experts.is_plain_softmax,
        biased=experts.biased,
        scales_inputs=experts.scales_inputs,
    )


def logits_dtype(spec: ModelSpec, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of ``CudaModel.logits``."""
    return dtype if spec.logit_soft_cap is None else torch.float32
