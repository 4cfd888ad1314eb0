"""The places of a step's tokens, as the layers of a model see them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.kernels.cuda.attention.common import RaggedRows
from penstock.models.backends.cuda.recurrent import RecurrentStep


class WindowPlaces(NamedTuple):
    """The places of the keys and values of T tokens in the layers of a windowed group."""

    slots: Tensor
    """(T,) int64, as ``StepTensors.slots``."""
    rows: RaggedRows
    """The step's sequences, with the group's tables."""


class TokenPlaces(NamedTuple):
    """A step's T tokens. See ``StepTensors``."""

    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    states: RecurrentStep | None = None
    """None without recurrent layers."""
    windows: Sequence[WindowPlaces] = ()
    """One for each windowed group of layers."""
