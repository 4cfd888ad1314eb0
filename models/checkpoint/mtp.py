"""Finds the head for multi-token prediction (MTP) in a model's own checkpoint: a layer that predicts the token after
the next one, https://arxiv.org/abs/2412.19437 section 2.2. transformers ignores these weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.spec import ModelSpec
from penstock.models.architecture.spec_parts import NamedShape
from penstock.models.checkpoint.checkpoint import find_quantization, match_tensors, read_entries
from penstock.models.checkpoint.draft_head import EMBEDDING, FC, HEAD, HeadCheckpoint, HeadSpec
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.layout import find_quantized
from penstock.models.checkpoint.tensor_names import find_views
from penstock.models.errors import ModelError

EMBEDDING_NORM, HIDDEN_NORM = "model.embedding_norm.weight", "model.hidden_norm.weight"
LAYER, NORM = "model.layers.0.", "model.norm."


class _MtpNaming(NamedTuple):
    """The names that a family's checkpoints give to the parts of a head, after their prefix."""

    count_field: str
    """The config field with the number of heads."""
    default_count: int
    """The number of heads of a config without that field."""
    prefix: str
    """The beginning of all names. ``{}`` stands for the model's number of layers."""
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str
    """The beginning of the layer's names; if empty, all other names are the layer's."""
    copies: tuple[str, ...] = ()
    """Copies of the model's embedding and output head, which are not loaded."""
    continues_after_norm: bool = False
    """See ``HeadSpec``."""


_AS_LAYER = _MtpNaming(
    "num_nextn_predict_layers", 0, "model.layers.{}.", "eh_proj.", "enorm.", "hnorm.", "shared_head.norm.", "",
    ("embed_tokens.", "shared_head.head."),
)  # fmt: skip
_QWEN3_NEXT = _MtpNaming(
    "num_nextn_predict_layers", 1, "mtp.", "fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "norm.",
    "layers.0.", continues_after_norm=True,
)  # fmt: skip
_QWEN3_5 = _QWEN3_NEXT._replace(count_field="mtp_num_hidden_layers")
NAMINGS: Mapping[str, _MtpNaming] = {
    "DeepseekV3ForCausalLM": _AS_LAYER,
    "Glm4MoeForCausalLM": _AS_LAYER,
    "Glm4MoeLiteForCausalLM": _AS_LAYER,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
}
"""The architectures whose heads can be loaded."""


@dataclass(frozen=True)
class MtpSpec(HeadSpec):
    """The shape of an MTP head: ``x = fc(norm(embedding), norm(hidden states))``, then an ordinary layer. It uses the
    model's embedding and output head."""

    @property
    def has_head(self) -> bool:
        return False

    @property
    def fc_columns(self) -> int:
        """The columns of an embedding and hidden states side by side."""
        return 2 * self.hidden_size

    @property
    def feature_columns(self) -> int:
        return self.hidden_size

    @property
    def hidden_norm(self) -> str:
        return HIDDEN_NORM

    def tensors(self) -> Iterator[NamedShape]:
        """The tensors of a model with one layer but without embedding and head, and those that only a head has."""
        for name, shape in super().tensors():
            if name not in (EMBEDDING, HEAD):
                yield name, shape
        for name in (EMBEDDING_NORM, HIDDEN_NORM):
            yield name, (self.hidden_size,)
        yield f"{FC}.weight", (self.hidden_size, self.fc_columns)


def check_mtp_head(info: CheckpointInfo) -> HeadCheckpoint:
    """Checks the head of a checked model. Reads no tensor. Raises ModelError."""
    target, path, described = info.spec, info.path, HfConfigReader(info.config)
    naming = NAMINGS.get(target.architecture)
    if naming is None:
        raise ModelError(
            f"--speculative-config: mtp: {target.architecture} has no head that can be loaded; there are heads for "
            f"{', '.join(NAMINGS)}: choose another method"
        )
    if path.is_file():
        raise ModelError("--speculative-config: mtp: heads are not read from GGUF files: choose another method")
    if described.integer(naming.count_field, 0, 1024, naming.default_count) == 0:
        raise described.wrong(
            naming.count_field,
            "must be at least 1 for --speculative-config mtp: the model has no head; choose another method",
        )
    if described.flag("mtp_use_dedicated_embeddings", False):
        raise described.wrong(
            "mtp_use_dedicated_embeddings",
            "must be false for --speculative-config mtp: a head with an embedding of its own is not supported; choose "
            "another method",
        )
    spec = _spec(target, naming)
    prefix = naming.prefix.format(target.num_layers + len(target.left_out_layers))
    entries = find_views(spec, _renamed(read_entries(path), naming, prefix))
    if not entries:
        raise ModelError(
            f"{path}: there is no tensor {prefix}*: this copy of the model came without its head; download the "
            "original, or choose another --speculative-config"
        )
    quantization = find_quantization(path, info.config)
    quantized = find_quantized(quantization, spec, entries, path, partial(_stored_name, naming, prefix))
    tensors = match_tensors(spec, entries, quantized, path)
    head = CheckpointInfo(path, info.config, spec, tensors, quantization, quantized)
    return HeadCheckpoint(head, spec, (target.num_layers,), np.arange(target.vocab_size))


def _spec(target: ModelSpec, naming: _MtpNaming) -> MtpSpec:
    """Returns the shape of a head whose layer is like the model's last one with attention."""
    last, experts = max(filter(target.attends, range(target.num_layers))), target.experts
    one = replace(
        target.at(last),
        num_layers=1,
        left_out_layers=(),
        intermediate_sizes=None,
        kv_sources=(0,),
        recurrent=(None,),
        ropes=target.ropes[last : last + 1],
        windows=target.windows[last : last + 1],
        experts=experts and replace(experts, layers=experts.layers[last : last + 1]),
    )
    return MtpSpec(**vars(one), has_embedding=False, continues_after_norm=naming.continues_after_norm)


def _renamed(entries: Mapping[str, TensorEntry], naming: _MtpNaming, prefix: str) -> dict[str, TensorEntry]:
    """Returns the head's tensors under the names of ``MtpSpec.tensors``, before those of its layer are split."""
    parts = {
        naming.fc: f"{FC}.",
        naming.embedding_norm: EMBEDDING_NORM.removesuffix("weight"),
        naming.hidden_norm: HIDDEN_NORM.removesuffix("weight"),
        naming.norm: NORM,
        naming.layer: LAYER,
    }
    found = {}
    for name, entry in entries.items():
        local = name.removeprefix(prefix)
        if local == name or local.startswith(naming.copies):
            continue
        old = next((old for old in parts if local.startswith(old)), None)
        found[name if old is None else parts[old] + local.removeprefix(old)] = entry
    return found


def _stored_name(naming: _MtpNaming, prefix: str, name: str) -> str:
    """Returns the checkpoint's name of a linear."""
    return prefix + (naming.fc.removesuffix(".") if name == FC else naming.layer + name.removeprefix(LAYER))
