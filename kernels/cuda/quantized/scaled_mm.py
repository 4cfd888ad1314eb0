"""Products with weights in fp8 by torch's ``scaled_mm``, which is cuBLAS's, for steps of many tokens. Which of them are
faster than ``gemm`` depends on the GPU, so it is measured."""

import logging
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.inputs import narrow_inputs
from penstock.kernels.cuda.quantized.tiles import BUCKETS
from penstock.kernels.cuda.quantized.weights import Codes, QuantizedWeight, WeightLayout

logger = logging.getLogger(__name__)

ALIGNED = 16
"""Rows and columns are multiples of this number."""
MEASURED_TOKENS = (256, 2048)
"""The numbers of tokens at which both are measured."""
MIN_TOKENS = tuple(int(bucket.max_tokens) + 1 for bucket in BUCKETS[-3:-1])
"""The numbers of tokens from which ``scaled_mm`` may be used: where ``gemm`` changes its tiles."""


def has_scaled_mm(layout: WeightLayout, dtype: torch.dtype) -> bool:
    """Whether torch can multiply inputs of a dtype by a weight: rows with one scale each, without padding."""
    is_fp8 = layout.codes is Codes.FP8 and layout.narrows_inputs and not layout.group
    is_aligned = layout.row_size == layout.columns and layout.rows % ALIGNED == 0
    return is_fp8 and is_aligned and dtype == torch.bfloat16 and hasattr(functional, "ScalingType")


def scaled_mm(x: Tensor, weight: QuantizedWeight, room: GemmWorkspace) -> Tensor:
    """x W^T, with x quantised as ``gemm`` does: (T, K) -> (T, N). ``has_scaled_mm`` must hold."""
    tokens, columns = x.shape
    assert weight.scales is not None
    narrow = room.inputs_as(torch.float8_e4m3fn, tokens, columns)
    scales = room.input_scales[:tokens]
    narrow_inputs(x, narrow, scales)
    by_rows = functional.ScalingType.RowWise
    made: Tensor = functional.scaled_mm(
        narrow, weight.codes.t(), scales[:, None], by_rows, weight.scales.t(), by_rows, output_dtype=x.dtype
    )
    return made


def measure_min_tokens(
    weight: QuantizedWeight, room: GemmWorkspace, max_tokens: int, seconds_of: Callable[[Callable[[], object]], float]
) -> float:
    """Returns the number of tokens from which ``scaled_mm`` is faster than ``gemm``; infinity if it never is."""
    layout, device = weight.layout, weight.codes.device
    found = math.inf
    for tokens, least in zip(reversed(MEASURED_TOKENS), reversed(MIN_TOKENS), strict=True):
        if least > max_tokens:
            continue
        x = torch.randn(min(tokens, max_tokens), layout.columns, dtype=torch.bfloat16, device=device)
        out = x.new_empty(len(x), layout.rows)
        ours = seconds_of(partial(gemm, x, weight, out, room))
        try:
            theirs = seconds_of(partial(scaled_mm, x, weight, room))
        except (RuntimeError, ValueError) as error:
            logger.info("products in fp8 are computed by the project's kernels, since torch has none here: %s", error)
            break
        if theirs >= ours:
            break
        found = least
    return found
