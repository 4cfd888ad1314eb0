"""Describes a head: a layer that drafts for a model from the model's own hidden states."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.info import CheckpointInfo

EMBEDDING, HEAD, FC = "model.embed_tokens.weight", "lm_head.weight", "fc"


@dataclass(frozen=True)
class HeadSpec(ModelSpec):
    """The shape of a head. Its tensors have the names that they would have in a model of one layer.

    Position p of a head continues from the model's hidden states at p, and from token p + 1.
    """

    has_embedding: bool
    """False: the head uses the model's embedding."""
    continues_after_norm: bool
    """Whether the next draft continues from the hidden states after the head's last norm, not from those before it."""

    @property
    def has_table(self) -> bool:
        return self.has_embedding

    @property
    def fc_columns(self) -> int:
        """The columns of ``fc``, whose output the layer continues from."""
        raise NotImplementedError

    @property
    def feature_columns(self) -> int:
        """The columns of a position's features."""
        raise NotImplementedError

    @property
    def hidden_norm(self) -> str:
        """The name of the norm of what the head continues from."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head whose files passed every check."""

    info: CheckpointInfo
    spec: HeadSpec
    feature_layers: tuple[int, ...]
    """Layers of the model, ascending. The hidden states before them are the head's features; with the number of layers,
    those after the model's last norm."""
    target_ids: NDArray[np.int64]
    """(draft vocabulary,): the model's id of each token that can be drafted."""
