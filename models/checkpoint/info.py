"""What the check of a model's files returns. Does not import torch. Does not depend on the files' format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.quantization.config import AT_LOAD, METHODS, choose_quantization
from penstock.models.checkpoint.quantization.layout import QuantizedLinear
from penstock.models.checkpoint.quantization.scheme import Quantization
from penstock.models.errors import ModelError

CONFIG = "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of tensors that can be loaded, with torch's names for them."""


class HeadActivation(Enum):
    """The function that turns the logits of a classification head into its values."""

    NONE = auto()
    SIGMOID = auto()
    SOFTMAX = auto()


@dataclass(frozen=True)
class ClassifierInfo:
    """The classification head of a checked model."""

    labels: tuple[str, ...]
    activation: HeadActivation
    pad_token_id: int | None
    """The token that does not count as a text's last one; None: every token counts."""
    weight: TensorEntry | None = None
    """(labels, hidden); None if the weights were not checked."""
    bias: TensorEntry | None = None
    """(labels,); None: 0."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A model whose files passed every check."""

    path: Path
    """The model's directory, or its GGUF file."""
    config: Mapping[str, Any]
    spec: ModelSpec
    tensors: Mapping[str, TensorEntry]
    """The tensors of ``spec.tensors()``, except the weights in ``quantized``; empty if the weights were not checked."""
    quantization: Quantization | None
    """The scheme in config.json. None: all weights are floats, or were not checked."""
    quantized: Mapping[str, QuantizedLinear]
    """The linears that are stored quantised, by name; empty if the weights were not checked."""
    warnings: tuple[str, ...] = ()
    """What the files contain that is ignored, contradictory or costly, for the log."""
    kv_scales: Mapping[str, TensorEntry] = field(default_factory=dict)
    """The scales of a KV cache in fp8, each one number or one for each head, by names such as
    ``model.layers.0.self_attn.k_scale``."""
    is_eight_bit: bool = False
    """Whether most weights are stored in eight bits, in a form that no kernel reads (Q8_0)."""
    classifier: ClassifierInfo | None = None
    """The classification head in place of the output head, if there is one. Then the model generates nothing."""

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as torch names it; bfloat16 for weights that are dequantised at load. Without
        weights it comes from the config."""
        entry = self.tensors.get(EMBEDDING)
        if entry is not None:
            return FLOAT_DTYPES.get(entry.dtype, "bfloat16")
        named = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        return named if named in FLOAT_DTYPES.values() else "float32"

    def choose_quantization(self, requested: str) -> str:
        """The quantisation that the model runs with. Raises ModelError if that contradicts --quantization."""
        if requested in METHODS and requested not in AT_LOAD and not self.tensors:
            raise ModelError(
                f"--quantization {requested}: with --load-format dummy no checkpoint is read, and the dummy weights "
                "are floats: leave one of the two flags out, or give --quantization int8 or int4"
            )
        return choose_quantization(requested, self.quantization)

    def at_load(self, requested: str) -> str | None:
        """The member of AT_LOAD that float weights are quantised to, or None. ``requested`` is --quantization."""
        return requested if self.quantization is None and requested in AT_LOAD else None
