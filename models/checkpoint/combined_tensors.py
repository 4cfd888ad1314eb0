"""Describes how a checkpoint names tensors and combines several in one. ``tensor_layouts`` has the descriptions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.spec import ModelSpec


@dataclass(frozen=True)
class TensorPart:
    """A tensor inside another."""

    name: str
    offset: int
    """The offset of its first element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    rows: NDArray[np.int64] | None = None
    """The rows that it consists of, if they do not follow each other."""


@dataclass(frozen=True)
class CombinedTensor:
    """A tensor that contains others."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    turned: "CombinedTensor | None" = None
    """The layout of some checkpoints, with the last two dimensions exchanged."""


Wholes = Mapping[str, CombinedTensor]
"""The combined tensors of a layer, by name."""


def _none(spec: ModelSpec) -> Wholes:
    """No tensor contains others."""
    return {}


@dataclass(frozen=True)
class Naming:
    """The way in which a checkpoint names and combines the tensors of ``ModelSpec.tensors``."""

    prefixes: Sequence[tuple[str, str]] = ()
    """Beginnings of names; the first that fits is replaced."""
    renamed: Sequence[tuple[str, str]] = ()
    """Regular expressions for the beginnings of a layer's names, after the prefix; the first that fits is replaced."""
    wholes: Callable[[ModelSpec], Wholes] = _none
    has_draft_layers: bool = False
    """Whether layers follow that only propose drafts. They are not loaded."""
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that only propose drafts. They are not loaded."""
    image_rows: int = 0
    """The last rows of the embedding, which only images use. They are not loaded."""
