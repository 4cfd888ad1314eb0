"""Quantises a float matrix (N, K) at load. Uses only torch, on the matrix's device."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.quantized.weights import QuantizedWeight, pack_bytes, pack_int4

GROUP = 128
"""Columns that share a scale in ``quantize_int4``."""
SHRINKAGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Factors by which a group's range is shrunk on trial: values outside get a larger rounding error, values inside a
smaller one."""
CHUNK = 4096
"""Rows that are quantised at a time."""


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Quantises to int8: a row's largest magnitude becomes 127."""
    scales = _row_scales(weight, 127)
    codes = torch.cat([(part.float() / scale).round() for part, scale in _chunks(weight, scales)]).to(torch.int8)
    return pack_bytes(codes, scales)


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """Quantises to fp8: a row's largest magnitude becomes the largest of float8_e4m3fn. Products quantise their inputs
    too."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = _row_scales(weight, limit)
    parts = [
        (part.float() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn) for part, scale in _chunks(weight, scales)
    ]
    return pack_bytes(torch.cat(parts), scales, narrows_inputs=True)


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Quantises to int4: a grid of 16 steps for each group of a row. Of several ranges around zero, the group's full
    range and smaller ones, takes the one with the least squared error."""
    parts = [_int4_codes(part) for part in weight.split(CHUNK)]
    codes, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return pack_int4(codes, scales, zeros, group=GROUP)


def _row_scales(weight: Tensor, limit: float) -> Tensor:
    """The scales of rows, (N, 1) fp32; 1 for a row of zeros."""
    largest = weight.abs().amax(1, keepdim=True).float()
    return torch.where(largest > 0, largest / limit, 1.0)


def _chunks(weight: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weight.split(CHUNK), scales.split(CHUNK), strict=True))


def _int4_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes (N, K), and scales and zero points (N, groups)."""
    rows, columns = weight.shape
    groups = functional.pad(weight.float(), (0, -columns % GROUP)).view(rows, -1, GROUP)
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for shrinkage in SHRINKAGES:
        scale = (high - low) * (shrinkage / 15)
        scale = torch.where(scale > 0, scale, 1.0)
        zero = (-low * shrinkage / scale).round()
        codes = ((groups / scale).round() + zero).clamp(0, 15)
        error = ((codes - zero) * scale - groups).square().sum(2, keepdim=True)
        made = (error, codes, scale, zero)
        if best is None:
            best = made
        else:
            better = error < best[0]
            error, codes, scale, zero = (torch.where(better, new, old) for new, old in zip(made, best, strict=True))
            best = (error, codes, scale, zero)
    assert best is not None
    _, codes, scale, zero = best
    return codes.view(rows, -1)[:, :columns].to(torch.uint8), scale.squeeze(2), zero.squeeze(2)
