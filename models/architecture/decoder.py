"""Reads the config fields that families of decoders share. A family's function calls ``read_decoder`` and changes what
differs. Defaults are those of transformers' config classes, which leave them out of the files they write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import FULL, MAX_POSITIONS, SLIDING, RopeReader, read_rope
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import Activation, Experts, NormKind, NormPlacement, QkNorm

Family = Callable[[HfConfigReader, str], ModelSpec]
"""Reads the config of an architecture, whose name is the second argument."""

MAX_LAYERS = 1024
MAX_SIZE = 1 << 20
MAX_VOCAB = 1 << 24
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_EXPERTS = 4096

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
}
PLAIN_ACTIVATIONS = ACTIVATIONS | {"relu": Activation.RELU, "relu2": Activation.RELU_SQUARED}
"""The activations of an MLP without a gate."""

_OLD_FULL = "attention"
"""The name of full attention in older configs."""

_RARE: dict[str, Any] = {
    "latent": None,
    "attends_beside_recurrent": False,
    "factors": (),
    "intermediate_sizes": None,
    "unwindowed": None,
    "value_norm": False,
    "rounds_embedding_scale": False,
    "layer_inputs": None,
    "layer_scalars": False,
}
"""The fields that only Gemma or Falcon-H1 uses, or models with latent attention, with their values in other
families."""

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class Defaults:
    """A family's defaults for absent fields."""

    max_positions: int
    heads: int | None = None
    """None: the config has to have it, as with the two fields below."""
    vocab_size: int | None = None
    inner: int | None = None
    kv_heads: int | None = None
    """None: the number of query heads."""
    head_dim: int | None = None
    """None: the hidden size divided by the heads."""
    norm_eps: float = 1e-6
    norm_eps_field: str = "rms_norm_eps"
    activation_field: str = "hidden_act"
    activation: str = "silu"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    read_rope: RopeReader = read_rope


def read_decoder(fields: HfConfigReader, architecture: str, windows: Windows, defaults: Defaults) -> ModelSpec:
    """Reads the fields that all families share. Features that only some families have are off."""
    hidden_size = fields.integer("hidden_size", 1, MAX_SIZE)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS, defaults.heads)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, min(defaults.kv_heads or num_heads, num_heads))
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads, which is {num_heads}")
    head_dim = _head_dim(fields, hidden_size, num_heads, defaults)
    activation = fields.text(defaults.activation_field, defaults.activation)
    known = ACTIVATIONS if defaults.gated_mlp else PLAIN_ACTIVATIONS
    if activation not in known:
        raise fields.wrong(defaults.activation_field, f"must be one of {', '.join(known)}")
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, defaults.max_positions)
    rope = defaults.read_rope(fields, head_dim, max_positions)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB, defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE, defaults.inner),
        num_layers=len(windows),
        left_out_layers=(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        recurrent=(None,) * len(windows),
        mlp_only=None,
        kv_sources=tuple(range(len(windows))),
        max_positions=rope.max_positions,
        norm_kind=NormKind.RMS,
        norm_parts=("weight",),
        norm_eps=fields.number(defaults.norm_eps_field, 0.0, 1.0, defaults.norm_eps),
        norm_offset=0.0,
        norm_placement=NormPlacement.PRE,
        qk_norm=QkNorm.NONE,
        qk_norm_is_last=False,
        activation=known[activation],
        gated_mlp=defaults.gated_mlp,
        ropes=tuple(rope.full if window is None else rope.windowed for window in windows),
        rotary_dim=rope.rotary_dim,
        interleaved_rope=False,
        query_scaling=None,
        windows=windows,
        chunked_windows=False,
        qkv_bias=False,
        gated_attention=False,
        output_bias=False,
        mlp_bias=False,
        attention_scale=head_dim**-0.5,
        attention_soft_cap=None,
        sinks=False,
        embedding_scale=1.0,
        position_table=None,
        logit_scale=1.0,
        logit_soft_cap=None,
        head_bias=False,
        experts=None,
        tied_embeddings=fields.flag("tie_word_embeddings", defaults.tied_embeddings),
        **_RARE,
    )


def _head_dim(fields: HfConfigReader, hidden_size: int, num_heads: int, defaults: Defaults) -> int:
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, defaults.head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even for rotary embedding, and comes to {head_dim}")
    if "head_dim" not in fields and defaults.head_dim is None and hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"must be a multiple of num_attention_heads, which is {num_heads}")
    return head_dim


def with_biases(spec: ModelSpec, fields: HfConfigReader, default: bool = False) -> ModelSpec:
    """Applies ``attention_bias``, which covers the output projection too."""
    biased = fields.flag("attention_bias", default)
    return replace(spec, qkv_bias=biased, output_bias=biased)


def with_layer_norms(spec: ModelSpec, *parts: str) -> ModelSpec:
    """Makes all norms layer norms with these tensors."""
    return replace(spec, norm_kind=NormKind.LAYER, norm_parts=parts)


def read_experts(
    fields: HfConfigReader, name: str, default: int | None, default_per_token: int | None, intermediate_size: int
) -> Experts:
    """Experts in every layer. ``name`` is the field that holds their number. A field whose default is None is
    required."""
    num_experts = fields.integer(name, 1, MAX_EXPERTS, default)
    return Experts(
        num_experts=num_experts,
        per_token=fields.integer("num_experts_per_tok", 1, num_experts, default_per_token),
        intermediate_size=intermediate_size,
        normalise=True,
        biased=False,
        gate=None,
        layers=(True,) * num_layers(fields),
    )


def num_layers(fields: HfConfigReader) -> int:
    """The number of layers."""
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def same_windows(fields: HfConfigReader, window: int | None) -> Windows:
    """Returns the same window for all layers. ``layer_types`` must be valid, but has no effect, as in transformers'
    classes for these families (see ``ignored_layer_types``).
    """
    read_layer_types(fields)
    return (window,) * num_layers(fields)


def read_window(fields: HfConfigReader, default: int | None) -> int | None:
    """The value of ``sliding_window``, or None if it is null."""
    if fields.is_null("sliding_window") or ("sliding_window" not in fields and default is None):
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS, default)


def windows_by_type(fields: HfConfigReader, window: int | None, default: Callable[[int], bool]) -> Windows:
    """Uses ``layer_types`` if the config has it, else ``default``, which returns whether a layer has the window."""
    kinds = read_layer_types(fields) or [SLIDING if default(layer) else FULL for layer in range(num_layers(fields))]
    if window is None and SLIDING in kinds:
        raise fields.wrong("layer_types", f"needs sliding_window (and use_sliding_window) for its {SLIDING} layers")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def rotated_layers(fields: HfConfigReader) -> list[bool]:
    """Returns whether each layer rotates queries and keys: ``no_rope_layers`` has a 1 for those that do."""
    count = num_layers(fields)
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    rotated = fields.integers("no_rope_layers", 0, 1) or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(rotated) != count:
        raise fields.wrong("no_rope_layers", f"must have num_hidden_layers entries, {count}")
    return [turns == 1 for turns in rotated]


def shared_kv_sources(fields: HfConfigReader, kinds: Sequence[object], own: int) -> tuple[int, ...]:
    """Returns, for each layer, the layer whose keys and values it attends to. Only the first ``own`` layers have their
    own; each later one uses those of the last of them of its kind. ``kinds`` are the layers' windows or types."""
    latest = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if set(kinds[own:]) - latest.keys():
        raise fields.wrong(
            "num_kv_shared_layers", "must leave at least one layer of each kind with keys and values of its own"
        )
    return (*range(own), *(latest[kind] for kind in kinds[own:]))


def read_layer_types(fields: HfConfigReader, windowed: str = SLIDING) -> list[str] | None:
    """The kind of attention of each layer in ``layer_types``; None if the field is absent. ``windowed`` is the name of
    layers with a window."""
    if "layer_types" not in fields:
        return None
    count = num_layers(fields)
    kinds = [FULL if kind == _OLD_FULL else kind for kind in fields.texts("layer_types")]
    if len(kinds) != count:
        raise fields.wrong("layer_types", f"must have num_hidden_layers entries, {count}; it has {len(kinds)}")
    if unknown := set(kinds) - {FULL, windowed}:
        raise fields.wrong("layer_types", f"must name only {FULL} and {windowed}; {min(unknown)} is not supported")
    return kinds
