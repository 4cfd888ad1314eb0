"""Checks the files of an EAGLE-3 head before anything is loaded: config, names, shapes, dtypes. The head is a layer
that drafts for a model from the model's own hidden states: https://arxiv.org/abs/2503.01840."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.registry import spec_from_config
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import NamedShape
from penstock.models.checkpoint.checkpoint import read_entries, read_json
from penstock.models.checkpoint.draft_head import EMBEDDING, FC, HEAD, HeadCheckpoint, HeadSpec
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.info import CONFIG, FLOAT_DTYPES, CheckpointInfo
from penstock.models.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUM_FEATURES = 3
"""The number of the model's layers whose input hidden states the head gets."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

HIDDEN_NORM = "model.layers.0.hidden_norm.weight"
DRAFT_TO_TARGET, IS_DRAFTED = "d2t", "t2d"

UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of heads that compute something else."""


@dataclass(frozen=True)
class EagleSpec(HeadSpec):
    """The shape of an EAGLE-3 head: ``x = fc(features)``, then one layer. Its queries, keys and values are computed
    from the next token's embedding and x side by side, each after its norm. Logits cover a vocabulary of its own."""

    draft_vocab_size: int

    @property
    def qkv_columns(self) -> int:
        """The columns of an embedding and x side by side."""
        return 2 * self.hidden_size

    @property
    def head_rows(self) -> int:
        """One row for each token that can be drafted."""
        return self.draft_vocab_size

    @property
    def fc_columns(self) -> int:
        """The columns of a position's features."""
        return self.feature_columns

    @property
    def feature_columns(self) -> int:
        return NUM_FEATURES * self.hidden_size

    @property
    def hidden_norm(self) -> str:
        return HIDDEN_NORM

    def tensors(self) -> Iterator[NamedShape]:
        """The tensors of a model with one layer, and those that only a head has."""
        for name, shape in super().tensors():
            if name == HEAD:
                yield name, (self.draft_vocab_size, self.hidden_size)
            elif name != EMBEDDING or self.has_embedding:
                yield name, shape
        yield HIDDEN_NORM, (self.hidden_size,)
        yield f"{FC}.weight", (self.hidden_size, self.fc_columns)


def check_eagle_head(path: Path, target: ModelSpec) -> HeadCheckpoint:
    """Checks a head for a model. Reads no tensor except the map of ids. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"--speculative-config: {path}: no such directory: give the directory of an EAGLE-3 head")
    config = read_json(path / CONFIG)
    entries = read_entries(path)
    try:
        spec = _spec(config, target, has_embedding=_published(EMBEDDING) in entries)
        layers = _feature_layers(config, target)
    except ModelError as error:
        raise ModelError(f"{path / CONFIG}: {str(error).removeprefix(CONFIG + ': ')}") from error
    shapes = dict(spec.tensors())
    tensors = {name: _checked(entries, _published(name), shape, FLOAT_DTYPES, path) for name, shape in shapes.items()}
    if IS_DRAFTED in entries:
        _checked(entries, IS_DRAFTED, (spec.vocab_size,), ("BOOL",), path)
    for name in entries.keys() - set(map(_published, shapes)) - {DRAFT_TO_TARGET, IS_DRAFTED}:
        raise ModelError(
            f"{entries[name].file}: tensor {name} has no place in an EAGLE-3 head as {CONFIG} describes it: config and "
            "weights belong to different heads"
        )
    info = CheckpointInfo(path, config, spec, tensors, None, {})
    return HeadCheckpoint(info, spec, layers, _target_ids(entries, spec, path))


def _published(name: str) -> str:
    """Returns the name that published heads give to a tensor that has this name in a model."""
    return name.replace("model.layers.0.", "midlayer.").removeprefix("model.")


def _spec(config: Mapping[str, Any], target: ModelSpec, has_embedding: bool) -> EagleSpec:
    described = HfConfigReader(config)
    if not set(described.texts("architectures")) & set(ARCHITECTURES):
        raise described.wrong("architectures", f"must name {' or '.join(ARCHITECTURES)}: give an EAGLE-3 head")
    for name in UNSUPPORTED:
        if described.flag(name, False):
            raise described.wrong(name, "must be false: heads of this kind are not supported; give another one")
    # A head has an output matrix of its own. Its layer_types may be a copy of the model's, which has more layers.
    changes = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "layer_types": None}
    spec = spec_from_config({**config, **changes})
    if spec.num_layers != 1:
        raise described.wrong("num_hidden_layers", "must be 1: give an EAGLE-3 head")
    for name in ("hidden_size", "vocab_size"):
        if getattr(spec, name) != getattr(target, name):
            raise described.wrong(name, f"must be the model's, {getattr(target, name)}: give the head of this model")
    size = described.integer("draft_vocab_size", 1, spec.vocab_size, spec.vocab_size)
    return EagleSpec(**vars(spec), draft_vocab_size=size, has_embedding=has_embedding, continues_after_norm=False)


def _feature_layers(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Returns the layers in the config, or the default layers."""
    described, last = HfConfigReader(config), target.num_layers - 1
    if LAYER_IDS not in described:
        described = described.part("eagle_config")
    named = described.integers(LAYER_IDS, 0, last)
    layers = sorted(set(named or (2, target.num_layers // 2, target.num_layers - 3)))
    if len(layers) != NUM_FEATURES or layers[0] < 0 or layers[-1] > last:
        raise described.wrong(LAYER_IDS, f"must name {NUM_FEATURES} of the model's layers, 0 to {last}")
    return tuple(layers)


def _checked(
    entries: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...], dtypes: Collection[str], path: Path
) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        raise ModelError(f"{path}: tensor {name} is missing, and an EAGLE-3 head has it: download the head again")
    entry.check_shape(name, shape, CONFIG, "heads")
    if entry.dtype not in dtypes:
        raise ModelError(
            f"{entry.file}: tensor {name} has dtype {entry.dtype}: it must be {' or '.join(dtypes)}; use the "
            "unquantised head"
        )
    return entry


def _target_ids(entries: Mapping[str, TensorEntry], spec: EagleSpec, path: Path) -> NDArray[np.int64]:
    ids: NDArray[np.int64] = np.arange(spec.draft_vocab_size)
    if DRAFT_TO_TARGET not in entries and spec.draft_vocab_size == spec.vocab_size:
        return ids
    entry = _checked(entries, DRAFT_TO_TARGET, ids.shape, ("I64", "I32"), path)
    ids += TensorFiles([entry.file]).array(entry)
    if ids.min() < 0 or ids.max() >= spec.vocab_size or len(np.unique(ids)) < len(ids):
        raise ModelError(
            f"{entry.file}: tensor {DRAFT_TO_TARGET} does not map to different tokens of {spec.vocab_size}: download "
            "the head again"
        )
    return ids
