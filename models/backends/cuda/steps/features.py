"""Features on a device, with the slicing and copying that drafters need."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.models.backends.torch_common.device import copy_to

FEW = 256
"""The limit of lines whose memory may be held for the sake of one of them."""


@dataclass(frozen=True, eq=False)
class DeviceFeatures:
    """``FeatureLines`` on a device."""

    tensor: Tensor
    """(n, columns)."""
    held: int
    """The number of lines whose memory these lines hold."""

    @classmethod
    def of(cls, tensor: Tensor) -> "DeviceFeatures":
        """Wraps a tensor that owns its memory."""
        return cls(tensor, len(tensor))

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice | list[int]) -> "DeviceFeatures":
        if isinstance(part, slice):
            return DeviceFeatures(self.tensor[part], self.held)
        return DeviceFeatures.of(self.tensor.index_select(0, copy_to(self.tensor.device, part)))

    def copy(self) -> "DeviceFeatures":
        """Returns itself if it holds little memory, otherwise a copy."""
        return self if self.held <= FEW else DeviceFeatures.of(self.tensor.clone())


def tensors(parts: Sequence[object]) -> list[Tensor]:
    """Returns the tensors of these features."""
    return [part.tensor for part in parts if isinstance(part, DeviceFeatures)]
