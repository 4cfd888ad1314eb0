"""Reads rotary embedding from a Hugging Face config. Independent of model families: callers pass what differs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.spec_parts import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    QueryScaling,
    Rope,
    YarnRope,
)
from penstock.models.errors import ModelError

MAX_POSITIONS = 1 << 27
MAX_THETA = 1e12

FULL, SLIDING = "full_attention", "sliding_attention"
"""The names of layers without a window and with one."""
CHUNKED = "chunked_attention"
"""The name of layers that attend within chunks."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a model."""

    full: Rope
    """The rope of layers without a window."""
    windowed: Rope
    max_positions: int
    """The number of positions that the model was made for."""
    rotary_dim: int


RopeReader = Callable[[HfConfigReader, int, int], RopeConfig]
"""A family's reader of configs. Its arguments are the config, the head size and max_position_embeddings."""


def read_rope(
    fields: HfConfigReader,
    head_dim: int,
    max_positions: int,
    default_theta: float = 10_000.0,
    default_part: float | None = None,
) -> RopeConfig:
    """Reads one rope for all layers. ``default_part`` is the part of each head that is rotated unless the config has
    another; None for families that rotate whole heads."""
    scaling = _scaling(fields)
    rotary_dim = head_dim
    if default_part is not None:
        rotary_dim = _rotary_dim(fields, scaling, head_dim, default_part)
    else:
        for holder in (fields, scaling):
            if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
                raise holder.wrong(
                    "partial_rotary_factor", "is not supported in this family: only whole heads are rotated"
                )
    theta = _theta(fields, scaling, "rope_theta", default_theta)
    if _kind(scaling) == "dynamic" and "alpha" in scaling:  # Hunyuan's: it does not depend on a sequence's length
        if head_dim == 2:
            raise scaling.wrong("alpha", "is defined only for heads of more than 2 dimensions")
        theta *= scaling.number("alpha", 1e-6, 1e9) ** (head_dim / (head_dim - 2))
    rope, max_positions = _scaled(scaling, theta, max_positions)
    return RopeConfig(rope, rope, max_positions, rotary_dim)


def read_query_scaling(fields: HfConfigReader) -> QueryScaling | None:
    """Reads Llama 4's scaling of queries, which is part of the rope's parameters; None if there is none."""
    scaling = _scaling(fields)
    if "llama_4_scaling_beta" not in scaling:
        return None
    return QueryScaling(
        scaling.number("llama_4_scaling_beta", 0.0, 1e3),
        scaling.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
    )


def read_score_factor(fields: HfConfigReader) -> float:
    """Reads the factor of latent attention's scores that a scaled rope defines with ``mscale_all_dim``."""
    scaling = _scaling(fields)
    weight = scaling.number("mscale_all_dim", 0.0, 1e6, 0.0)
    if _kind(scaling) == "default" or not weight:
        return 1.0
    return _yarn_scale(scaling.number("factor", 1.0, 1e6), weight) ** 2


def read_rope_by_layer_type(
    fields: HfConfigReader,
    head_dim: int,
    max_positions: int,
    default_theta: float = 1e6,
    local_theta: str = "rope_local_base_freq",
    default_local_theta: float = 1e4,
) -> RopeConfig:
    """Reads Gemma 3's ropes: layers with a window have their own, and only the other layers' rope is scaled.
    ``max_position_embeddings`` includes the scaling. ``local_theta`` is the field with the theta of the former.
    """
    scaling = _scaling(fields)
    nested = FULL in scaling or SLIDING in scaling
    full = scaling.part(FULL) if nested else scaling
    windowed = scaling.part(SLIDING) if nested else HfConfigReader({})
    return RopeConfig(
        full=_scaled(full, _theta(fields, full, "rope_theta", default_theta), max_positions)[0],
        windowed=_scaled(windowed, _theta(fields, windowed, local_theta, default_local_theta), max_positions)[0],
        max_positions=max_positions,
        rotary_dim=head_dim,
    )


def read_proportional_rope(fields: HfConfigReader, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads Gemma 4's ropes: whole heads are rotated in layers with a window, and a part of the pairs in the others."""
    scaling = _scaling(fields)
    full, windowed = scaling.part(FULL), scaling.part(SLIDING)
    if _kind(windowed) != "default":
        raise _wrong_kind(windowed, "default")
    kind = full.text("rope_type", "proportional")
    if kind not in ("default", "proportional"):
        raise _wrong_kind(full, "default and proportional")
    for holder in (windowed, *((full,) if kind == "default" else ())):
        if holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise holder.wrong("partial_rotary_factor", "is only for the rope type proportional")
    theta = full.number("rope_theta", 1.0, MAX_THETA, 1e6)
    default_part = 1.0 if FULL in scaling else 0.25
    turned = ProportionalRope(
        theta, full.number("factor", 1e-6, 1e6, 1.0), full.number("partial_rotary_factor", 0.0, 1.0, default_part)
    )
    return RopeConfig(
        full=DefaultRope(theta) if kind == "default" else turned,
        windowed=DefaultRope(windowed.number("rope_theta", 1.0, MAX_THETA, 1e4)),
        max_positions=max_positions,
        rotary_dim=head_dim,
    )


def read_partial_rope(fields: HfConfigReader, head_dim: int, max_positions: int) -> RopeConfig:
    """Reads Phi-3's rope: only part of each head is rotated, and the rope is plain or LongRoPE.

    LongRoPE has two sets of factors, and switches to the other set once a sequence outgrows the original context. The
    keys cached until then would be wrong, so a model serves only its original context.
    """
    scaling = _scaling(fields)
    theta = _theta(fields, scaling, "rope_theta", 1e4)
    rotary_dim = _rotary_dim(fields, scaling, head_dim, 1.0)
    kind = _kind(scaling)
    if kind == "default":
        rope: Rope = DefaultRope(theta)
    elif kind in ("longrope", "su", "yarn"):  # the last two are old names of the first
        holder = fields if "original_max_position_embeddings" in fields else scaling
        original = holder.integer("original_max_position_embeddings", 2, MAX_POSITIONS, 4096)
        factors = scaling.numbers("short_factor", rotary_dim // 2, 1e-6, 1e6)
        factor = scaling.number("factor", 1e-6, 1e6, max_positions / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        rope = LongRope(theta, factors, scaling.number("attention_factor", 1e-6, 1e6, scale))
        max_positions = min(original, max_positions)
    else:
        raise _wrong_kind(scaling, "default and longrope")
    return RopeConfig(rope, rope, max_positions, rotary_dim)


def with_default_scaling(fields: HfConfigReader, **scaling: Any) -> HfConfigReader:
    """Returns a reader of a config that has these rope parameters unless it describes its own."""
    if "rope_parameters" in fields or "rope_scaling" in fields:
        return fields
    return fields.with_values(rope_parameters=scaling)


def _rotary_dim(fields: HfConfigReader, scaling: HfConfigReader, head_dim: int, default_part: float) -> int:
    holder = scaling if "partial_rotary_factor" in scaling else fields
    rotary_dim = int(head_dim * holder.number("partial_rotary_factor", 0.0, 1.0, default_part))
    if rotary_dim < 2 or rotary_dim % 2:
        raise holder.wrong("partial_rotary_factor", f"must leave an even number of rotated dimensions of {head_dim}")
    return rotary_dim


def _scaling(fields: HfConfigReader) -> HfConfigReader:
    """The part that describes scaling.

    transformers 5 writes everything into ``rope_parameters``. Older checkpoints have ``rope_scaling`` beside
    ``rope_theta``; in the oldest the type is called ``type``.
    """
    return fields.part("rope_parameters" if "rope_parameters" in fields else "rope_scaling")


def _scaled(scaling: HfConfigReader, theta: float, max_positions: int) -> tuple[Rope, int]:
    """Returns the rope that a part describes, and the number of positions that its scaling makes usable."""
    match _kind(scaling):
        case "default" | "dynamic" | "mrope":
            # Dynamic scaling starts beyond the original context, and changes keys that are cached by then. So a model
            # serves only its original context. ``mrope`` differs only for images.
            return DefaultRope(theta), max_positions
        case "linear":
            factor = scaling.number("factor", 1.0, 1e6)
            return LinearRope(theta, factor), min(MAX_POSITIONS, int(max_positions * factor))
        case "llama3":
            return _llama3_rope(scaling, theta, max_positions), max_positions
        case "yarn":
            yarn = _yarn_rope(scaling, theta, max_positions)
            return yarn, max(max_positions, min(MAX_POSITIONS, int(yarn.original_max_positions * yarn.factor)))
    raise _wrong_kind(scaling, "default, linear, llama3, yarn and dynamic")


def _kind(scaling: HfConfigReader) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _wrong_kind(scaling: HfConfigReader, known: str) -> ModelError:
    name = "rope_type" if "rope_type" in scaling else "type"
    return scaling.wrong(name, f"must be one of {known}: other rope types are not supported")


def _theta(fields: HfConfigReader, scaling: HfConfigReader, old_name: str, default: float) -> float:
    """Reads theta. transformers 5 writes it into the scaling section, older versions next to that section."""
    return scaling.number("rope_theta", 1.0, MAX_THETA, fields.number(old_name, 1.0, MAX_THETA, default))


def _llama3_rope(scaling: HfConfigReader, theta: float, max_positions: int) -> Llama3Rope:
    low = scaling.number("low_freq_factor", 1e-6, 1e6)
    high = scaling.number("high_freq_factor", 1e-6, 1e6)
    if high < low:
        raise scaling.wrong("high_freq_factor", f"must be at least low_freq_factor, which is {low:g}")
    return Llama3Rope(
        theta,
        factor=scaling.number("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=scaling.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions),
    )


def _yarn_rope(scaling: HfConfigReader, theta: float, max_positions: int) -> YarnRope:
    if theta <= 1.0:
        raise ModelError("config.json: rope_theta must be above 1 for yarn")
    original = scaling.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    factor = scaling.number("factor", 1.0, 1e6, max(1.0, max_positions / original))
    return YarnRope(
        theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=scaling.number("beta_slow", 1e-6, 1e6, 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor),
        truncate=scaling.flag("truncate", True),
    )


def _yarn_attention_factor(scaling: HfConfigReader, factor: float) -> float:
    """The value of ``attention_factor``; else 0.1 ln(factor) + 1, as in the paper, or the quotient that ``mscale`` and
    ``mscale_all_dim`` define.
    """
    if "attention_factor" in scaling:
        return scaling.number("attention_factor", 1e-6, 1e6)

    numerator = scaling.number("mscale", 0.0, 1e6, 0.0)
    denominator = scaling.number("mscale_all_dim", 0.0, 1e6, 0.0)
    if numerator and denominator:
        return _yarn_scale(factor, numerator) / _yarn_scale(factor, denominator)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0
