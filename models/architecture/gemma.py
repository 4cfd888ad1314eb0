"""Gemma 1 to 3."""

import math
from dataclasses import replace

from penstock.models.architecture.decoder import (
    MAX_LAYERS,
    Defaults,
    read_decoder,
    read_window,
    same_windows,
    windows_by_type,
    with_biases,
)
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import read_rope_by_layer_type
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import Activation, NormPlacement, QkNorm

GEMMA = Defaults(
    max_positions=131072,
    kv_heads=4,
    head_dim=256,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tied_embeddings=True,
)


def gemma(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 1: Llama with one added to the norms' weights. Its ``hidden_act`` is ``gelu`` where it means the
    approximation by tanh."""
    defaults = replace(GEMMA, max_positions=8192, kv_heads=16)
    spec = read_decoder(fields, architecture, same_windows(fields, None), defaults)
    return replace(
        with_biases(spec, fields),
        activation=Activation.GELU_TANH,
        norm_offset=1.0,
        embedding_scale=math.sqrt(spec.hidden_size),
    )


def gemma2(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 2: norms around both halves of a layer, soft caps, and a window in every other layer."""
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: layer % 2 == 0)
    spec = read_decoder(fields, architecture, windows, replace(GEMMA, max_positions=8192))
    return replace(
        _with_gemmas_parts(spec, fields),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(fields: HfConfigReader, architecture: str) -> ModelSpec:
    """Gemma 3's text model: Gemma 2 with norms on queries and keys instead of the cap on scores."""
    if "attn_logit_softcapping" in fields:
        raise fields.wrong("attn_logit_softcapping", "must be null: scores have no cap in Gemma 3")
    pattern = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = windows_by_type(fields, read_window(fields, 4096), lambda layer: (layer + 1) % pattern != 0)
    # The config of a model with vision contains only what differs from these.
    defaults = replace(GEMMA, heads=8, vocab_size=262208, read_rope=read_rope_by_layer_type)
    spec = read_decoder(fields, architecture, windows, defaults)
    return replace(
        _with_gemmas_parts(spec, fields),
        qk_norm=QkNorm.HEAD,
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def _with_gemmas_parts(spec: ModelSpec, fields: HfConfigReader) -> ModelSpec:
    """Applies what Gemma 2 and 3 share."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.wrong("use_bidirectional_attention", "is not supported: only causal models generate text")
    return replace(
        with_biases(spec, fields),
        norm_offset=1.0,
        norm_placement=NormPlacement.BOTH,
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6, 256.0) ** -0.5,
        embedding_scale=math.sqrt(spec.hidden_size),
    )


def _soft_cap(fields: HfConfigReader, name: str, default: float | None) -> float | None:
    """The value of the field, or None if it is null."""
    if fields.is_null(name) or (name not in fields and default is None):
        return None
    return fields.number(name, 1e-3, 1e6, default)
