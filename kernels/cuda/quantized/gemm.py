"""Matrix products y = x W^T + bias with quantised weights, for few tokens and for many; and with unquantised weights,
if a token's result must not depend on the batch in any bit.

Nothing here waits for the device, so a CUDA graph can capture it; workspaces are allocated once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.cuda.core.common import check, num_warps, product_dtype
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.quantized.gemm_kernels import gemm_kernel, reduce_kernel
from penstock.kernels.cuda.quantized.inputs import gather_inputs, gather_variant, narrow_inputs, narrow_variant
from penstock.kernels.cuda.quantized.tiles import (
    PART_TOKENS,
    STEADY_PART_TOKENS,
    GemmTiles,
    all_tiles,
    num_parts,
)
from penstock.kernels.cuda.quantized.weights import Codes, QuantizedWeight, WeightLayout

BLOCK_JOINED = 1024
"""The maximum number of outputs of a program that adds up parts."""


@dataclass(frozen=True)
class GemmWorkspace:
    """The workspace of products. Products that run one after another may share one."""

    deterministic: bool
    """Whether a token's results are bitwise the same in every batch."""
    partials: Tensor
    """Flat, fp32: the partial sums of the parts."""
    inputs: Tensor
    """Flat, uint8: quantised inputs, or inputs in the order of the codes' columns."""
    input_scales: Tensor
    """Flat, fp32."""

    @classmethod
    def allocate(
        cls,
        layouts: Iterable[WeightLayout],
        dtype: torch.dtype,
        max_tokens: int,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> "GemmWorkspace":
        """Allocates room for products with these weights and up to ``max_tokens`` tokens of the given dtype."""
        part_tokens = min(max_tokens, STEADY_PART_TOKENS if deterministic else PART_TOKENS)
        num_partials, input_bytes, num_scales = 0, 0, 0
        for layout in layouts:
            if num_parts(layout) > 1:
                num_partials = max(num_partials, num_parts(layout) * part_tokens * layout.rows)
            if layout.is_ordered or layout.narrows_inputs:
                itemsize = 1 if layout.narrows_inputs else dtype.itemsize
                input_bytes = max(input_bytes, max_tokens * layout.columns * itemsize)
            if layout.narrows_inputs:
                num_scales = max(num_scales, max_tokens * layout.num_groups)
        return cls(
            deterministic,
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.empty(input_bytes, dtype=torch.uint8, device=device),
            torch.empty(num_scales, dtype=torch.float32, device=device),
        )

    @property
    def part_tokens(self) -> int:
        """Tokens that are multiplied at a time if their sums have parts."""
        return STEADY_PART_TOKENS if self.deterministic else PART_TOKENS

    def inputs_as(self, dtype: torch.dtype, tokens: int, columns: int) -> Tensor:
        """The start of ``inputs``, viewed as (tokens, columns) of a dtype."""
        return self.inputs[: tokens * columns * dtype.itemsize].view(dtype).view(tokens, columns)


@cache
def gemm_variant(layout: WeightLayout, dtype: torch.dtype, tiles: GemmTiles, is_biased: bool) -> KernelVariant:
    """The variant of the kernel that multiplies. If there are several parts, ``reduce_variant`` finishes their sums."""
    finishes = tiles.parts == 1
    # The sum of each group needs its scales.
    has_input_scales = layout.narrows_groups or (layout.narrows_inputs and finishes)
    return KernelVariant(
        gemm_kernel,
        {
            "x": layout.codes.value if layout.narrows_inputs else dtype,
            "codes": layout.codes.value,
            "scales": None if layout.codes.are_floats else torch.float32,
            "zeros": torch.uint8 if layout.codes is Codes.INT4 else None,
            "input_scales": torch.float32 if has_input_scales else None,
            "bias": torch.float32 if is_biased and finishes else None,
            "out": dtype if finishes else torch.float32,
            "num_tokens": "i32",
        },
        {
            "ROWS": layout.rows,
            "COLUMNS": layout.columns,
            "ROW_SIZE": layout.row_size,
            "GROUP": layout.group,
            "PARTS": tiles.parts,
            "PRODUCT": None if layout.narrows_inputs else product_dtype(dtype),
            "SUM": tl.int32 if layout.narrows_inputs and layout.codes is Codes.INT8 else tl.float32,
            "BLOCK_T": tiles.block_t,
            "BLOCK_N": tiles.block_n,
            "BLOCK_K": layout.block,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@cache
def reduce_variant(layout: WeightLayout, dtype: torch.dtype, is_biased: bool) -> KernelVariant:
    """The variant of the kernel that adds up the parts."""
    block = min(triton.next_power_of_2(layout.rows), BLOCK_JOINED)
    return KernelVariant(
        reduce_kernel,
        {
            "partials": torch.float32,
            "scales": torch.float32 if layout.scales_rows else None,
            "input_scales": torch.float32 if layout.narrows_inputs and not layout.narrows_groups else None,
            "bias": torch.float32 if is_biased else None,
            "out": dtype,
            "num_tokens": "i32",
        },
        {"ROWS": layout.rows, "PARTS": num_parts(layout), "BLOCK": block},
        num_warps=num_warps(block),
    )


def gemm_variants(
    layout: WeightLayout, dtype: torch.dtype, max_tokens: int, *, deterministic: bool, is_biased: bool
) -> Iterator[KernelVariant]:
    """All variants that ``gemm`` launches for such a weight and 1 to ``max_tokens`` tokens."""
    if layout.is_ordered:
        yield gather_variant(dtype, layout.columns)
    if layout.narrows_inputs:
        yield narrow_variant(dtype, layout.codes.value, layout.columns, layout.group)
    for tiles in all_tiles(layout, dtype, max_tokens, deterministic=deterministic):
        yield gemm_variant(layout, dtype, tiles, is_biased)
    if num_parts(layout) > 1:
        yield reduce_variant(layout, dtype, is_biased)


def gemm(x: Tensor, weight: QuantizedWeight, out: Tensor, room: GemmWorkspace, bias: Tensor | None = None) -> None:
    """out = x W^T + bias, summed in fp32; if the weight narrows inputs, x is first quantised by ``narrow_inputs``.

    ``x`` is (T, K) and ``out`` (T, N), both of the same dtype, which is the weight's if that is not quantised; ``bias``
    is (N,) fp32. If the room is ``deterministic``, no bit of a token's results depends on other tokens: the columns are
    summed in the same order, by the same instructions, however many tokens there are.
    """
    layout, tokens = weight.layout, x.shape[0]
    check(x, (tokens, layout.columns), x.dtype)
    check(out, (tokens, layout.rows), x.dtype)
    if bias is not None:
        check(bias, (layout.rows,), torch.float32)
    dtype, input_scales = x.dtype, None
    if weight.order is not None:
        ordered = room.inputs_as(dtype, tokens, layout.columns)
        gather_inputs(x, weight.order, ordered)
        x = ordered
    if layout.narrows_inputs:
        narrow = room.inputs_as(layout.codes.value, tokens, layout.columns)
        input_scales = room.input_scales[: tokens * layout.num_groups]
        if layout.group:
            input_scales = input_scales.view(tokens, layout.num_groups)
        narrow_inputs(x, narrow, input_scales, layout.group)
        x = narrow
    tiles = all_tiles(layout, dtype, tokens, deterministic=room.deterministic)[-1]
    step = room.part_tokens if tiles.parts > 1 else tokens
    for begin in range(0, tokens, step):
        taken = slice(begin, begin + step)
        taken_scales = None if input_scales is None else input_scales[taken]
        _multiply(x[taken], weight, out[taken], room, taken_scales, bias, tiles)


def _multiply(
    x: Tensor,
    weight: QuantizedWeight,
    out: Tensor,
    room: GemmWorkspace,
    input_scales: Tensor | None,
    bias: Tensor | None,
    tiles: GemmTiles,
) -> None:
    """Multiplies as many tokens as there is room for their partial sums."""
    layout, tokens, is_biased = weight.layout, x.shape[0], bias is not None
    grid = (triton.cdiv(tokens, tiles.block_t) * triton.cdiv(layout.rows, tiles.block_n), tiles.parts)
    variant = gemm_variant(layout, out.dtype, tiles, is_biased)
    operands = (x, weight.codes, weight.scales, weight.zeros)
    if tiles.parts == 1:
        variant.launch(grid, *operands, input_scales, bias, out, tokens)
        return
    assert room.partials.numel() >= tiles.parts * tokens * layout.rows
    group_scales, token_scales = (input_scales, None) if layout.narrows_groups else (None, input_scales)
    variant.launch(grid, *operands, group_scales, None, room.partials, tokens)
    joined = reduce_variant(layout, out.dtype, is_biased)
    row_scales = weight.scales if layout.scales_rows else None
    blocks = triton.cdiv(layout.rows, joined.constants["BLOCK"])
    joined.launch((tokens, blocks), room.partials, row_scales, token_scales, bias, out, tokens)
