"""Describes a decoder that has no family here: only what the KV cache and the scheduler need. The backend
``transformers`` runs it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.models.architecture.decoder import (
    Defaults,
    read_decoder,
    read_layer_types,
    same_windows,
    shared_kv_sources,
)
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope_config import FULL, SLIDING
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import NamedShape

SUFFIXES = ("ForCausalLM", "LMHeadModel")
"""The endings of the names of decoders in transformers."""

_SIZES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": (),
    "head_dim": (),
    "vocab_size": (),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "tie_word_embeddings": (),
}
"""The fields that are read, with their other names in old configs."""


@dataclass(frozen=True)
class ForeignSpec(ModelSpec):
    """A decoder of transformers. Fields that are not sizes have no meaning."""

    num_stored: int = 0
    """The number of parameters in the checkpoint."""

    def tensors(self) -> Iterator[NamedShape]:
        """Yields nothing: transformers knows the tensors."""
        return iter(())

    @property
    def num_parameters(self) -> int:
        """The number of parameters in the checkpoint."""
        return self.num_stored


def foreign_spec(config: Mapping[str, Any]) -> ForeignSpec | None:
    """Returns the sizes of a decoder that a config.json describes, or None if ``architectures`` names no decoder.
    Raises ModelError naming a field that is missing."""
    described = HfConfigReader(config)
    architecture = next((name for name in described.texts("architectures") if name.endswith(SUFFIXES)), None)
    if architecture is None:
        return None
    sizes = HfConfigReader(
        {
            name: config[found]
            for name, others in _SIZES.items()
            for found in (name, *others)
            if config.get(found) is not None
        }
    )
    spec = read_decoder(sizes, architecture, same_windows(sizes, None), Defaults(max_positions=2048, inner=1))
    spec = replace(spec, kv_sources=_kv_sources(described, spec))
    return ForeignSpec(**{field.name: getattr(spec, field.name) for field in fields(ModelSpec)})


def _kv_sources(described: HfConfigReader, spec: ModelSpec) -> tuple[int, ...]:
    """Gemma 3n's last layers attend to the keys and values of earlier ones. Other decoders that do so keep copies."""
    if described.text("model_type", "") != "gemma3n_text":
        return spec.kv_sources
    num_shared = described.integer("num_kv_shared_layers", 0, spec.num_layers - 1, min(15, spec.num_layers - 1))
    kinds = read_layer_types(described) or [FULL if layer % 5 == 4 else SLIDING for layer in range(spec.num_layers)]
    return shared_kv_sources(described, kinds, spec.num_layers - num_shared)
