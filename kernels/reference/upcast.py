"""The dtype in which the references compute."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Returns ``x`` in at least fp32: 16-bit floats are converted, others are returned unchanged."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
