"""The type in which an engine on torch is fastest on this processor."""

import torch


def fastest_dtype() -> torch.dtype:
    """Returns bfloat16, or float32 where oneDNN, which multiplies for torch, has no bfloat16, as on processors with
    only AVX2. There, torch multiplies bfloat16 by itself: at 10 GFLOP/s on a core of a Zen 3, against 67 in float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Returns the name that engines take, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
