"""The type in which an engine on torch is fastest on this processor."""

import torch


def fastest_dtype() -> torch.dtype:
    """Returns bfloat16, or float32 where oneDNN, which multiplies for torch, has no bfloat16. There, torch's own
    product in bfloat16 is 10 times as slow as the one in float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Returns the name that engines take, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
