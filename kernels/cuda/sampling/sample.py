"""Chooses a token for each sampled position, the same one as ``kernels/reference/sampling.py`` and its callers on the
CPU: each step has the same meaning, order and precision.

There are eight kernels with fixed grids. A kernel that a position does not need returns immediately.

    forbid           positions           bits of stops that come too early, and of ends of bad words
    process_logits   positions x slices  penalties, biases, masks; the best of each slice
    sum_top_p_mass   positions x slices  ln of the sum of e^score, for top-p
    build_histogram  positions x slices  a histogram of the first filter's weights over scores
    list_candidates  positions x slices  the keys in the bin where the filter ends
    find_threshold   positions           where filters end, among these keys
    draw             positions x slices  min-p, noise; the best of each slice
    choose           positions           the best of all slices

Slices of the vocabulary are the same in every batch, and sums over slices are sums of integers. The token therefore
depends only on the position's logits and row, and on the position itself.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cuda.core.common import check
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.sampling.draw import choose, draw
from penstock.kernels.cuda.sampling.logits import process_logits
from penstock.kernels.cuda.sampling.tensors import (
    NUM_INTEGERS,
    NUM_NUMBERS,
    WORKSPACE,
    Lines,
    SamplerRows,
    SamplerShape,
    sizes_of,
)
from penstock.kernels.cuda.sampling.token_masks import forbid
from penstock.kernels.cuda.sampling.top_k_top_p import build_histogram, find_threshold, list_candidates, sum_top_p_mass

OF_LINES = (forbid, find_threshold, choose)
"""Kernels with one program per sampled position. The others have one for each of its slices."""
KERNELS = (forbid, process_logits, sum_top_p_mass, build_histogram, list_candidates, find_threshold, draw, choose)
"""All kernels in the order of their launches."""

GIVEN = {
    "num_lines": torch.int32,
    "rows": torch.int32,
    "positions": torch.int32,
    "num_drafts": torch.int32,
    "masks": torch.int32,
    "mask_words": torch.int32,
    "numbers": torch.float64,
    "integers": torch.int64,
    "histories": torch.int32,
    "counts": torch.int32,
    "biases": torch.float32,
    "word_starts": torch.int32,
    "word_tokens": torch.int32,
    "token_ids": torch.int32,
}
"""The types of the kernels' arguments, except logits and the ``WORKSPACE``."""


def sampling_variants(shape: SamplerShape) -> list[KernelVariant]:
    """The variants of all ``KERNELS``."""
    return [_variant(kernel, shape) for kernel in KERNELS]


@cache
def _variant(kernel: Any, shape: SamplerShape) -> KernelVariant:
    kinds = {**GIVEN, **{name: kind for name, (kind, *_) in WORKSPACE.items()}, "logits": shape.dtype}
    constants = {
        "VOCAB": shape.vocab_size,
        "STRIDE": shape.stride,
        "MAX_HISTORY": shape.max_history,
        "SLICE": shape.slice,
        "SLICES": shape.slices,
        "BINS": shape.bins,
        "LISTED": shape.listed,
    }
    names = kernel.arg_names
    return KernelVariant(
        kernel,
        {name: kinds[name] for name in names if name not in constants},
        {name: value for name, value in constants.items() if name in names},
        num_warps=4 if kernel in (forbid, choose) else shape.num_warps,
    )


def sample(
    shape: SamplerShape, logits: Tensor, rows: SamplerRows, lines: Lines, room: dict[str, Tensor], token_ids: Tensor
) -> None:
    """Writes the token of each sampled position to ``token_ids`` (N,) int32. ``room`` is a ``WORKSPACE``.

    ``logits`` is (N, stride), of which the first V entries of a row are used. They are not modified. If a position's
    best logit is not finite, which means that the model is broken, it gets the lowest token that its mask allows, or 0.
    """
    num_lines = len(lines.rows)
    check(logits, (num_lines, shape.stride), shape.dtype)
    _check(shape, rows, lines)
    for name, (kind, *sizes) in WORKSPACE.items():
        check(room[name], (num_lines, *sizes_of(shape, sizes)), kind)
    check(token_ids, (num_lines,), torch.int32)
    values = {"logits": logits, **vars(rows), **vars(lines), **room, "token_ids": token_ids}
    for kernel in KERNELS:
        variant = _variant(kernel, shape)
        grid = (num_lines,) if kernel in OF_LINES else (num_lines, shape.slices)
        variant.launch(grid, *(values[name] for name in variant.arguments))


def _check(shape: SamplerShape, rows: SamplerRows, lines: Lines) -> None:
    (num_lines,), (num_rows, _) = lines.rows.shape, rows.integers.shape
    shapes: dict[str, tuple[int, ...]] = {
        "numbers": (num_rows, NUM_NUMBERS.value),
        "integers": (num_rows, NUM_INTEGERS.value),
        "histories": (num_rows, shape.max_history),
        "counts": (len(rows.counts), shape.vocab_size),
        "biases": (len(rows.biases), shape.vocab_size),
        "word_starts": (len(rows.word_starts),),
        "word_tokens": (len(rows.word_tokens),),
        "num_lines": (1,),
        "mask_words": (len(lines.mask_words), shape.mask_words),
        **dict.fromkeys(("rows", "positions", "num_drafts", "masks"), (num_lines,)),
    }
    for name, tensor in (vars(rows) | vars(lines)).items():
        check(tensor, shapes[name], GIVEN[name])
