"""Reads the head of a model for sequence classification: one row of weights, and so one logit, for each label. Also
makes such a head from the rows of two tokens of an output head. Uses numpy only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.foreign import ForeignSpec
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.registry import has_classifier
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.info import (
    CONFIG,
    EMBEDDING,
    FLOAT_DTYPES,
    HEAD,
    CheckpointInfo,
    ClassifierInfo,
    HeadActivation,
)
from penstock.models.checkpoint.quantization.reader import as_floats
from penstock.models.errors import ModelError

MAX_LABELS = 4096
WEIGHT, BIAS = "score.weight", "score.bias"
TOKENS_FLAG = "--score-tokens"

_MAX_PRODUCTS = 1 << 17
"""The most products of a head that reduces a hidden state as soon as it is there: about 30 us on the event loop."""
_OUTPUT_HEAD = HEAD.removesuffix("weight")
_MAX_LABEL_CHARS = 1000
_PROBLEMS = {
    "regression": HeadActivation.NONE,
    "single_label_classification": HeadActivation.SOFTMAX,
    "multi_label_classification": HeadActivation.SIGMOID,
}
_FUNCTIONS = {"Identity": HeadActivation.NONE, "Sigmoid": HeadActivation.SIGMOID, "Softmax": HeadActivation.SOFTMAX}
"""The activation functions of sentence-transformers' cross-encoders, by the last part of their names in torch."""
_DEFAULT_PAD = {
    "Gemma2ForCausalLM": 0,
    "Gemma3ForCausalLM": 0,
    "GemmaForCausalLM": 0,
    "Glm4ForCausalLM": 151329,
    "GlmForCausalLM": 151329,
    "HunYuanDenseV1ForCausalLM": 0,
    "HunYuanMoEV1ForCausalLM": 0,
    "Ministral3ForCausalLM": 11,
    "OPTForCausalLM": 1,
    "Olmo2ForCausalLM": 1,
    "Olmo3ForCausalLM": 1,
    "OlmoForCausalLM": 1,
    "Phi3ForCausalLM": 32000,
    "SeedOssForCausalLM": 1,
    "SmolLM3ForCausalLM": 128004,
}
"""The ``pad_token_id`` of transformers' config classes, which a file omits if it is the same."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ClassificationHead:
    """The head: logits are ``weight @ hidden + bias``, where hidden is the state of a text's last token after the
    model's last norm."""

    weight: Floats
    """(labels, hidden), float32."""
    bias: Floats
    """(labels,), float32."""
    labels: tuple[str, ...]
    activation: HeadActivation
    pad_token_id: int | None = None
    """The token that does not count as a text's last one, as in transformers; None: every token counts."""

    def logits(self, hidden: bytes) -> bytes:
        """Returns the logits of a hidden state. Both are float32 numbers in the machine's byte order. The bits depend
        only on the state."""
        state = np.frombuffer(hidden, np.float32)
        # Not BLAS: it would start threads of its own beside the worker's.
        values: Floats = np.einsum("lh,h->l", self.weight, state) + self.bias
        return values.tobytes()

    def reduced(self, hidden: bytes) -> bytes:
        """Returns what ``values`` needs of a hidden state: the logits, or the whole state if they take long. Fast."""
        return self.logits(hidden) if self._is_small else hidden

    def values(self, reduced: bytes, use_activation: bool) -> list[float]:
        """Returns a value for each label: what the activation function makes of the logits, or the logits. Takes about
        10 us, or 0.3 ms for each million products of a head that does not reduce states."""
        values: Floats = np.frombuffer(reduced if self._is_small else self.logits(reduced), np.float32)
        if use_activation and self.activation is HeadActivation.SIGMOID:
            # This form does not overflow for logits far below 0.
            values = np.exp(-np.logaddexp(np.float32(0), -values))
        elif use_activation and self.activation is HeadActivation.SOFTMAX:
            powers = np.exp(values - values.max())
            values = powers / powers.sum()
        found: list[float] = values.tolist()
        return found

    @property
    def _is_small(self) -> bool:
        return self.weight.size <= _MAX_PRODUCTS

    def last_counted(self, token_ids: list[int]) -> list[int]:
        """Returns a text's tokens up to the one whose state counts: the last that is not padding, or the first."""
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self.pad_token_id:
            end -= 1
        return token_ids[:end]


def find_classifier(whole: Mapping[str, Any], config: Mapping[str, Any], spec: ModelSpec) -> ClassifierInfo | None:
    """Returns the classification head that a config.json describes, or None. ``config`` is the part of ``whole`` about
    the language model. Raises ModelError that names the field."""
    if not has_classifier(whole):
        return None
    if isinstance(spec, ForeignSpec):
        raise ModelError("architectures: a classification head on a decoder without a family is not supported")
    labels = _labels(whole)
    pad = config.get("pad_token_id", _DEFAULT_PAD.get(spec.architecture))
    is_id = isinstance(pad, int) and not isinstance(pad, bool)
    return ClassifierInfo(labels, _activation(whole, len(labels)), pad if is_id else None)


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the labels, in order. transformers has 2 labels by default."""
    fields = HfConfigReader(config)
    if "id2label" not in fields:
        return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 1, MAX_LABELS, 2)))
    names = config["id2label"]
    if not isinstance(names, dict) or not 1 <= len(names) <= MAX_LABELS:
        raise fields.wrong("id2label", f"must be an object with the names of 1 to {MAX_LABELS:,} labels")
    found = [names.get(str(index)) for index in range(len(names))]
    labels = tuple(name for name in found if isinstance(name, str) and len(name) <= _MAX_LABEL_CHARS)
    if len(labels) < len(names):
        raise fields.wrong("id2label", f"must have a name for each number from 0 to {len(names) - 1}")
    return labels


def _activation(config: Mapping[str, Any], num_labels: int) -> HeadActivation:
    """Returns the activation function: that of the cross-encoder, of the problem, or the default of the number of
    labels."""
    fields = HfConfigReader(config)
    trained = fields.part("sentence_transformers")
    for holder, name in ((trained, "activation_fn"), (fields, "sbert_ce_default_activation_function")):
        if name in holder:
            function = _FUNCTIONS.get(holder.text(name).rpartition(".")[2])
            if function is None:
                raise holder.wrong(name, f"must be one of torch's {', '.join(_FUNCTIONS)}: remove it for the default")
            return function
    named = None
    if "problem_type" in fields:
        named = _PROBLEMS.get(fields.text("problem_type"))
        if named is None:
            raise fields.wrong("problem_type", f"must be one of {', '.join(_PROBLEMS)}")
    if named is None or named is HeadActivation.SOFTMAX:  # the softmax of a single logit is always 1
        return HeadActivation.SIGMOID if num_labels == 1 else HeadActivation.SOFTMAX
    return named


def take_classifier(
    classifier: ClassifierInfo, stored: Mapping[str, TensorEntry], spec: ModelSpec, path: Path
) -> tuple[ClassifierInfo, dict[str, TensorEntry]]:
    """Returns the head with its tensors, and a checkpoint's other tensors, without those of an output head, which
    transformers ignores too. Raises ModelError if the head's tensors are missing or wrong."""
    num_labels, hidden_size = len(classifier.labels), spec.hidden_size
    entry = stored.get(WEIGHT)
    if entry is None:
        raise ModelError(f"{path}: the classification head, tensor {WEIGHT}, is missing: download the weights again")
    shapes = {WEIGHT: (num_labels, hidden_size), BIAS: (num_labels,)}
    found = {name: stored[name] for name in shapes if name in stored}
    for name, tensor in found.items():
        tensor.check_shape(name, shapes[name], f"{CONFIG}, with {num_labels} labels in id2label,")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{tensor.file}: tensor {name} has dtype {tensor.dtype}: a classification head must be "
                f"{', '.join(FLOAT_DTYPES)}; use the unquantised checkpoint"
            )
    others = {name: each for name, each in stored.items() if name not in found and not name.startswith(_OUTPUT_HEAD)}
    return replace(classifier, weight=entry, bias=found.get(BIAS)), others


def read_head(classifier: ClassifierInfo, hidden_size: int) -> ClassificationHead:
    """Reads the tensors of a checked head. Without weights (``--load-format dummy``) they are 0. Raises ModelError."""
    shape = len(classifier.labels), hidden_size
    weight = np.zeros(shape, np.float32) if classifier.weight is None else _read(classifier.weight, WEIGHT)
    bias = np.zeros(shape[0], np.float32) if classifier.bias is None else _read(classifier.bias, BIAS)
    return ClassificationHead(weight, bias, classifier.labels, classifier.activation, classifier.pad_token_id)


def head_of_tokens(
    checkpoint: CheckpointInfo, token_ids: tuple[int, int], names: tuple[str, str]
) -> ClassificationHead:
    """Returns the head whose probability is that of the second token, if the next one is either of the two. It is the
    difference of their rows in the output head. Raises ModelError."""
    spec = checkpoint.spec
    if checkpoint.classifier is not None:
        raise ModelError(f"{TOKENS_FLAG}: the model has a classification head of its own: leave the flag out")
    if spec.logit_soft_cap is not None:
        raise ModelError(f"{TOKENS_FLAG}: the logits of {spec.architecture} are capped, which is not supported")
    name = EMBEDDING if spec.tied_embeddings else HEAD
    entry = checkpoint.tensors.get(name)
    if entry is None or entry.dtype not in FLOAT_DTYPES or entry.strides is not None or entry.rows is not None:
        raise ModelError(
            f"{TOKENS_FLAG}: needs the rows of {name} as floats, and {checkpoint.path} has none: use the unquantised "
            "checkpoint in Hugging Face's layout, of a family that penstock models lists"
        )
    no, yes = _read(entry, name, rows=list(token_ids))
    weight = ((yes - no) * np.float32(spec.logit_scale))[None]
    bias = np.zeros(1, np.float32)
    if spec.head_bias:
        no_bias, yes_bias = _read(checkpoint.tensors["lm_head.bias"], "lm_head.bias", rows=list(token_ids))
        bias[0] = (yes_bias - no_bias) * np.float32(spec.logit_scale)
    return ClassificationHead(weight, bias, (names[1],), HeadActivation.SIGMOID)


def _read(entry: TensorEntry, name: str, rows: list[int] | None = None) -> Floats:
    """Returns a tensor, or some of its rows, in float32. Raises ModelError."""
    stored = TensorFiles([entry.file]).array(entry)
    values = as_floats(stored if rows is None else stored[rows], entry.dtype)
    if not np.isfinite(values).all():
        raise ModelError(f"{entry.file}: tensor {name} has a value that is not a finite number: download it again")
    return values
