"""Matrices in the layout that the kernels read: W = (code - zero) * scale, with N rows and K columns.

Codes are stored row by row, in blocks of columns; the last block is padded with zeros. With four bits, a byte holds
column j of the lower half of its block in its low bits and column j of the upper half in its high bits. So a program
unpacks two runs of adjacent columns and multiplies each by itself. Floats are W itself, without padding.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cuda.core.common import check
from penstock.kernels.reference.fused import dequantize

BLOCK_COLUMNS = 128
"""The maximum number of columns that are multiplied at a time."""
BLOCK_FLOATS = 64
"""The same for floats, which need more memory."""
GROUP_STEP = 32
"""The number of columns in a group is a multiple of this."""


class Codes(Enum):
    """The storage format of a weight; the value is the dtype that holds it."""

    INT8 = torch.int8
    """Signed bytes; one scale per row."""
    FP8 = torch.float8_e4m3fn
    """One scale per row, or per row and group of columns."""
    INT4 = torch.uint8
    """0 to 15, two per byte; one scale and one zero point per row and group of columns."""
    BF16 = torch.bfloat16
    """Unquantised floats in the inputs' dtype, without scales; likewise FP16 and FP32."""
    FP16 = torch.float16
    FP32 = torch.float32

    @property
    def are_floats(self) -> bool:
        """Whether the weight is not quantised."""
        return self in (Codes.BF16, Codes.FP16, Codes.FP32)


@dataclass(frozen=True)
class WeightLayout:
    """The properties of a weight that its product is compiled for."""

    codes: Codes
    rows: int
    """N, the outputs."""
    columns: int
    """K, the inputs."""
    group: int = 0
    """Columns that share a scale, for INT4, and for FP8 that narrows inputs; 0: all. The last group may be shorter."""
    narrows_inputs: bool = False
    """Whether inputs are quantised to the codes' dtype as well, with one scale per token and group. Not with INT4."""
    is_ordered: bool = False
    """Whether the codes' columns are in a different order than the inputs'. Only with INT4."""

    def __post_init__(self) -> None:
        """Asserts that the kernels support the layout; the caller has validated the model."""
        assert self.rows > 0
        assert self.columns > 0
        assert self.group >= 0
        assert self.group % GROUP_STEP == 0
        if self.codes is Codes.INT4:
            assert not self.narrows_inputs
        else:
            assert not self.group or (self.codes is Codes.FP8 and self.narrows_inputs)
            assert not self.is_ordered
        if self.codes.are_floats:
            assert not self.narrows_inputs

    @property
    def block(self) -> int:
        """Columns in a block: a power of 2, all with the same scale."""
        if self.codes.are_floats:
            return BLOCK_FLOATS
        return min(self.group & -self.group or BLOCK_COLUMNS, BLOCK_COLUMNS)

    @property
    def num_blocks(self) -> int:
        return -(-self.columns // self.block)

    @property
    def num_groups(self) -> int:
        return -(-self.columns // self.group) if self.group else 1

    @property
    def narrows_groups(self) -> bool:
        """Whether inputs have a scale for each group."""
        return self.narrows_inputs and self.group > 0

    @property
    def scales_rows(self) -> bool:
        """Whether whole sums are multiplied by scales of their rows."""
        return not (self.codes is Codes.INT4 or self.codes.are_floats or self.group)

    @property
    def row_size(self) -> int:
        """Elements in a row of codes."""
        if self.codes.are_floats:
            return self.columns
        columns = self.num_blocks * self.block
        return columns // 2 if self.codes is Codes.INT4 else columns

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and zero points in bytes."""
        of_group = 0 if self.codes.are_floats else 5 if self.codes is Codes.INT4 else 4
        return self.rows * (self.row_size * self.codes.value.itemsize + self.num_groups * of_group)


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix on the device."""

    layout: WeightLayout
    codes: Tensor
    """(N, ``row_size``) of the codes' dtype."""
    scales: Tensor | None
    """(N, groups) fp32; None for floats."""
    zeros: Tensor | None
    """(N, groups) uint8; only for INT4."""
    order: Tensor | None
    """(K,) int32: column c of the codes belongs to input ``order[c]``; None: the orders are equal."""

    def __post_init__(self) -> None:
        layout = self.layout
        check(self.codes, (layout.rows, layout.row_size), layout.codes.value)
        assert (self.scales is None) == layout.codes.are_floats
        assert (self.zeros is None) == (layout.codes is not Codes.INT4)
        assert (self.order is None) == (not layout.is_ordered)
        if self.scales is not None:
            check(self.scales, (layout.rows, layout.num_groups), torch.float32)
        if self.zeros is not None:
            check(self.zeros, (layout.rows, layout.num_groups), torch.uint8)
        if self.order is not None:
            check(self.order, (layout.columns,), torch.int32)


def keep_floats(weight: Tensor) -> QuantizedWeight:
    """Wraps W itself, (N, K), whose memory it shares. For deterministic products."""
    return QuantizedWeight(WeightLayout(Codes(weight.dtype), *weight.shape), weight, None, None, None)


def pack_bytes(codes: Tensor, scales: Tensor, *, group: int = 0, narrows_inputs: bool = False) -> QuantizedWeight:
    """W = code * scale. ``codes`` is (N, K), int8 or float8_e4m3fn. ``scales`` has one scale per row and ``group``
    columns (0: per row), or a single one, in any shape and float dtype."""
    rows, columns = codes.shape
    layout = WeightLayout(Codes(codes.dtype), rows, columns, group, narrows_inputs)
    padded = functional.pad(codes.view(torch.uint8), (0, layout.row_size - columns)).view(codes.dtype)
    wide = scales.float().reshape(-1, layout.num_groups).expand(rows, layout.num_groups).contiguous()
    return QuantizedWeight(layout, padded.contiguous(), wide, None, None)


def pack_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor, *, group: int, order: Tensor | None = None
) -> QuantizedWeight:
    """W = (code - zero) * scale, group by group.

    ``codes`` is (N, K) uint8 from 0 to 15, ``scales`` (N, groups) of any float dtype, ``zeros`` (N, groups) of any
    dtype, integers from 0 to 127. ``group`` columns share a scale and a zero point; 0: all columns. Column c of the
    codes is column ``order[c]`` (K,) of W; None: the orders are equal.
    """
    rows, columns = codes.shape
    layout = WeightLayout(Codes.INT4, rows, columns, group, is_ordered=order is not None)
    kept_zeros = zeros.to(torch.uint8)
    # The kernels' 16-bit floats represent integers up to 127, and their differences to a code, exactly.
    assert bool(((kept_zeros == zeros) & (kept_zeros < 128)).all()), "zero points are integers from 0 to 127"
    padded = functional.pad(codes, (0, layout.num_blocks * layout.block - columns))
    low, high = padded.view(rows, layout.num_blocks, 2, layout.block // 2).unbind(2)
    return QuantizedWeight(
        layout,
        (low | high << 4).view(rows, -1),
        scales.float().contiguous(),
        kept_zeros.contiguous(),
        None if order is None else order.to(torch.int32).contiguous(),
    )


def multiplied_out(weight: QuantizedWeight, begin: int, end: int) -> Tensor:
    """Dequantises the rows of W from ``begin`` up to ``end``, with columns in the order of W: (rows, K) fp32."""
    layout, codes = weight.layout, weight.codes[begin:end]
    if weight.scales is None:
        return codes.float()
    if weight.zeros is not None:
        blocks = codes.view(len(codes), layout.num_blocks, -1)
        codes = torch.cat((blocks & 15, blocks >> 4), dim=2).view(len(codes), -1)
    zeros = None if weight.zeros is None else weight.zeros[begin:end]
    return dequantize(codes[:, : layout.columns], weight.scales[begin:end], zeros, layout.group, weight.order)
