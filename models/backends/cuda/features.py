"""Lines of a matrix on a device, as a drafter cuts and keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 256
"""Lines whose memory may be kept for the sake of one of them."""


@dataclass(frozen=True, eq=False)
class DeviceFeatures:
    """A ``FeatureLines``."""

    tensor: Tensor
    """(n, columns)."""
    held: int
    """Lines whose memory is held with these."""

    @classmethod
    def of(cls, tensor: Tensor) -> "DeviceFeatures":
        """All that there is."""
        return cls(tensor, len(tensor))

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice | list[int]) -> "DeviceFeatures":
        if isinstance(part, slice):
            return DeviceFeatures(self.tensor[part], self.held)
        chosen = torch.tensor(part, device=self.tensor.device)
        return DeviceFeatures.of(self.tensor.index_select(0, chosen))

    def copy(self) -> "DeviceFeatures":
        """Itself, where not much memory is held with it."""
        return self if self.held <= FEW else DeviceFeatures.of(self.tensor.clone())


def tensors(parts: Sequence[object]) -> list[Tensor]:
    """Of such lines."""
    return [part.tensor for part in parts if isinstance(part, DeviceFeatures)]
