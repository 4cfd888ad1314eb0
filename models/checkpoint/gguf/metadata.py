"""The metadata of a GGUF file, as readers of families see it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.architecture.decoder import MAX_LAYERS
from penstock.models.checkpoint.gguf.header import GgufHeader

ARCHITECTURE = "general.architecture"
DEFAULT_THETA = 10_000.0
GROUPED_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
"""The keys of the fields of experts in groups, by the names of config.json."""
Config = dict[str, Any]


class Metadata:
    """The metadata and the tensor names of a file, as families read them. Records which key each field comes from."""

    def __init__(self, header: GgufHeader) -> None:
        """Raises ModelError if the file names no architecture."""
        self.architecture = str(header.metadata.get(ARCHITECTURE))
        self.keys: dict[str, str] = {}
        """The key of each field of the config."""
        self._header = header

    def get(self, name: str) -> Any:
        """Returns the value of a key of the architecture; None if it is absent."""
        value = self._header.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, list) and value and all(item == value[0] for item in value[1:]):
            return value[0]  # one value per layer
        return value

    def fields(self, names: Mapping[str, str]) -> Config:
        """Returns the fields whose keys are present."""
        self.keys |= {field: f"{self.architecture}.{key}" for field, key in names.items()}
        return {field: value for field, key in names.items() if (value := self.get(key)) is not None}

    def has(self, tensor: str) -> bool:
        """Whether the file has the tensor, or the first layer has it."""
        return tensor in self._header.tensors or f"blk.0.{tensor}" in self._header.tensors

    @property
    def num_layers(self) -> int:
        """The number of layers; 0 if it is invalid, which the family's reader reports."""
        count = self.get("block_count")
        return count if isinstance(count, int) and 0 < count <= MAX_LAYERS else 0

    @property
    def num_draft_layers(self) -> int:
        """The number of layers at the end that are only for drafting."""
        count = self.get("nextn_predict_layers")
        return count if isinstance(count, int) and 0 <= count < self.num_layers else 0

    def layers_without(self, tensor: str) -> list[int]:
        """The layers that lack a tensor."""
        return [layer for layer in range(self.num_layers) if f"blk.{layer}.{tensor}" not in self._header.tensors]


Family = Callable[[Metadata, Config], Config]
"""Returns the fields that a family adds to the shared ones, which are the second argument."""


def head_dim(config: Config) -> int:
    """The head size; 0 if the metadata is invalid, which the family's reader reports."""
    size, hidden, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    return size if isinstance(size, int) and size > 0 else 0


def rotated_part(rotary_dim: object, size: int) -> Config:
    """The fraction of each head that is rotated, if it is less than 1."""
    if not isinstance(rotary_dim, int) or not size or rotary_dim == size:
        return {}
    part = rotary_dim / size
    # The family's reader multiplies and rounds down.
    return {"partial_rotary_factor": part if int(size * part) == rotary_dim else math.nextafter(part, 2.0)}
