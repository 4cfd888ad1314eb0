"""Reads a quantised linear into codes, scales and zero points, or into float32. Only numpy, one matrix at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.checkpoint.files.ggml import stored_shape
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.checkpoint.quantization.layout import CODES_PER_WORD, QuantizedLinear
from penstock.models.checkpoint.quantization.scheme import QuantLayout, QuantScheme
from penstock.models.errors import ModelError

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

NUMPY_DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I32": "<u4",
    "I8": "u1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
    "Q4_0": "u1",
}
"""The numpy type that represents each dtype. numpy has no bfloat16, so its bits are read."""

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds its first row, its second, and so on."""

ONE_EACH = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""A one in each code of a word, by the number of bits."""


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponents, significands = codes >> 3 & 15, codes & 7
    values = np.where(exponents == 0, np.ldexp(significands, -9), np.ldexp(8 + significands, exponents - 10))
    values[codes & 127 == 127] = np.nan
    signed: Floats = np.where(codes < 128, values, -values).astype(np.float32)
    return signed


E4M3_VALUES = _e4m3_values()
"""The value of each float8_e4m3fn: one sign bit, four bits of exponent and three of significand; no infinities."""

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The value of each four-bit float: one sign bit, two bits of exponent and one of significand."""

NO_SCALE = 255
"""The only byte that is not a scale of MXFP4. All others are the exponent of a power of two, plus EXPONENT_BIAS."""
EXPONENT_BIAS = 127

SIGN = 128
"""The sign bit of a byte, and what the bytes from 0 to 255 are shifted by to become signed."""

MIDDLE = 8
"""The zero point of four-bit codes in symmetric quantisation."""


@dataclass
class QuantizationError:
    """The error of quantising at load, over all matrices."""

    squared_error: float = 0.0
    squared_weights: float = 0.0

    @property
    def relative(self) -> float:
        """The root mean squared error divided by the root mean squared weight."""
        return (self.squared_error / self.squared_weights) ** 0.5 if self.squared_weights else 0.0


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight of (rows, columns): ``W = (code - zero) * scale`` in each group."""

    scheme: QuantScheme
    codes: Bytes
    """(rows, columns), contiguous; four-bit codes as 0 to 15, eight-bit codes as signed bytes or floats."""
    scales: Floats
    """(rows, groups)."""
    zeros: Floats
    """(rows, groups), in the units of the codes."""
    order: NDArray[np.int32] | None
    """(columns,): column c of the codes is column ``order[c]`` of W; None: the order is the same."""

    def is_alike(self, other: "QuantizedMatrix") -> bool:
        """Whether the two can be one matrix, their rows stacked."""
        forms = [(scheme.bits, scheme.is_float, scheme.group) for scheme in (self.scheme, other.scheme)]
        if forms[0] != forms[1]:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return np.array_equal(self.order, other.order)

    def dequantized(self) -> Floats:
        """W in float32, with its columns in their original order."""
        columns = self.codes.shape[1]
        if self.scheme.is_float:
            out = (E4M3_VALUES if self.scheme.bits == 8 else E2M1_VALUES)[self.codes]
        else:
            out = (self.codes.view(np.int8) if self.scheme.bits == 8 else self.codes).astype(np.float32)
        group = self.scheme.group or columns
        for index, begin in enumerate(range(0, columns, group)):
            part = out[:, begin : begin + group]
            part -= self.zeros[:, index : index + 1]
            part *= self.scales[:, index : index + 1]
        return out if self.order is None else np.take(out, np.argsort(self.order), axis=1)


def read_matrix(linear: QuantizedLinear) -> QuantizedMatrix:
    """Returns the weight of a linear. Raises ModelError if the file cannot be read or its content is invalid."""
    scheme, parts = linear.scheme, linear.parts
    match scheme.layout:
        case QuantLayout.GPTQ | QuantLayout.GPTQ_V2:
            codes, scales, zeros = _read_gptq(linear)
        case QuantLayout.AWQ:
            codes = _unpack_awq(_read_words(parts["qweight"]))
            zeros = _floats(_unpack_awq(_read_words(parts["qzeros"])))
            scales = read_floats(parts["scales"]).T
        case QuantLayout.PACKED:
            codes = _unpack(_read_words(parts["weight_packed"]))
            scales = read_floats(parts["weight_scale"])
            zeros = np.full(scales.shape, MIDDLE, np.float32)
            if scheme.has_zeros:
                zeros = _floats(_unpack(_read_words(parts["weight_zero_point"]).T).T)
        case QuantLayout.INT8:
            codes = _read(parts["weight"])
            scales = read_floats(parts["weight_scale"])
            zeros = np.zeros(scales.shape, np.float32)
        case QuantLayout.FP8:
            codes = _read(parts["weight"])
            scales = _read_fp8_scales(linear)
            zeros = np.zeros(scales.shape, np.float32)
        case QuantLayout.Q4_0:
            codes, scales = _read_q4_0(parts["weight"])
            zeros = np.full(scales.shape, MIDDLE, np.float32)
        case QuantLayout.MXFP4:
            packed, exponents = read_fp4(linear)
            codes = _unpack(packed)
            scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS)
            zeros = np.zeros(scales.shape, np.float32)
        case QuantLayout.NVFP4:
            codes = _unpack(_read(parts["weight_packed"] if "weight_packed" in parts else parts["weight"]))
            scales = _read_nv_scales(linear)
            zeros = np.zeros(scales.shape, np.float32)
    rows, columns = linear.rows, linear.columns
    codes, order, zeros = codes[:rows, :columns], _order(linear), zeros[:rows]
    if linear.row_order is not None:
        rows_in_order = linear.row_order
        codes, scales, zeros = codes[rows_in_order], scales[rows_in_order], zeros[rows_in_order]
    return QuantizedMatrix(
        scheme,
        codes=np.ascontiguousarray(codes) if order is None else np.take(codes, order, axis=1),
        scales=np.ascontiguousarray(scales),
        zeros=np.ascontiguousarray(zeros),
        order=order,
    )


def read_fp4(linear: QuantizedLinear) -> tuple[Bytes, Bytes]:
    """Returns the weight of a linear in MXFP4 as it is stored: two codes a byte, the low half first, and a biased
    exponent for each group. Raises ModelError."""
    parts = linear.parts
    blocks, scales = (parts["blocks"], parts["scales"]) if "blocks" in parts else (
        parts["weight_packed"], parts["weight_scale"]
    )  # fmt: skip
    exponents: Bytes = _read(scales)
    if (exponents == NO_SCALE).any():
        raise ModelError(f"{scales.file}: a scale of {linear.name} is not a number: download the weights again")
    return _read(blocks).reshape(linear.rows, -1), exponents


def _read_gptq(linear: QuantizedLinear) -> tuple[Bytes, Floats, Floats]:
    bias = linear.parts.get("bias")
    if bias is not None and read_floats(bias).any():
        raise ModelError(
            f"{bias.file}: tensor {linear.name}.bias is not zero, and the model that config.json describes has no such "
            "bias: config and weights belong to different models"
        )
    zero_words = _read_words(linear.parts["qzeros"])
    if linear.scheme.layout is QuantLayout.GPTQ:
        # Stored minus one. The quantiser subtracts it from whole words, with borrows, so it is added to whole words.
        zero_words = zero_words + ONE_EACH[linear.scheme.bits]
    words, scales = _read_words(linear.parts["qweight"]).T, read_floats(linear.parts["scales"]).T
    if linear.scheme.bits == 4:
        return _unpack(words), scales, _floats(_unpack(zero_words).T)
    # Signed bytes: codes and zero points are both shifted.
    codes = np.ascontiguousarray(words).view(np.uint8) ^ np.uint8(SIGN)
    return codes, scales, _floats(zero_words.view(np.uint8).T) - np.float32(SIGN)


def _read_fp8_scales(linear: QuantizedLinear) -> Floats:
    """Returns (rows, groups). Rows of the same block share their scales."""
    scheme, parts = linear.scheme, linear.parts
    stored = read_floats(parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"])
    shared = stored.reshape(-1, scheme.num_groups(linear.columns))
    return np.repeat(shared, scheme.rows or linear.rows, axis=0)[: linear.rows]


def _read_nv_scales(linear: QuantizedLinear) -> Floats:
    """Returns (rows, groups). There is a scale for the whole matrix too; compressed-tensors stores its reciprocal."""
    parts = linear.parts
    scales: Floats = E4M3_VALUES[_read(parts["weight_scale"])]
    if "weight_scale_2" in parts:
        scales *= read_floats(parts["weight_scale_2"]).reshape(())
    else:
        scales /= read_floats(parts["weight_global_scale"]).reshape(())
    return scales


def _read_q4_0(entry: TensorEntry) -> tuple[Bytes, Floats]:
    """A block has a scale in float16 and 16 bytes: their low nibbles are its first 16 columns, their high ones the
    others."""
    rows, columns = entry.shape
    blocks = _read(entry).reshape(rows, columns // 32, 18)
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    nibbles = blocks[..., 2:]
    return np.concatenate((nibbles & 15, nibbles >> 4), axis=-1).reshape(rows, columns), _floats(scales)


def _unpack(words: Words | Bytes) -> Bytes:
    """(n, w) -> (n, nibbles): the nibbles of each word or byte, from the lowest on."""
    pairs = np.ascontiguousarray(words).view(np.uint8).astype(np.uint16)
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


def _unpack_awq(words: Words) -> Bytes:
    """(n, w) -> (8 w, n)."""
    turned = np.ascontiguousarray(words.T)
    out = np.empty((CODES_PER_WORD * turned.shape[0], turned.shape[1]), np.uint8)
    for row, nibble in enumerate(AWQ_NIBBLES):
        out[row::CODES_PER_WORD] = turned >> np.uint32(4 * nibble) & np.uint32(15)
    return out


def _order(linear: QuantizedLinear) -> NDArray[np.int32] | None:
    """The columns in the order of their groups; None if they already are in that order."""
    name = "weight_g_idx" if linear.scheme.layout is QuantLayout.PACKED else "g_idx"
    entry = linear.parts.get(name)
    if entry is None or not linear.scheme.group:
        return None
    groups = _read_words(entry).view(np.int32)
    order = np.argsort(groups, kind="stable").astype(np.int32)
    regular = np.arange(linear.columns) // linear.scheme.group
    if not np.array_equal(groups[order], regular):
        raise ModelError(
            f"{entry.file}: tensor {linear.name}.{name} does not give each group {linear.scheme.group} columns, as "
            "quantization_config.group_size in config.json calls for: download the weights again"
        )
    return None if np.array_equal(groups, regular) else order


def _read_words(entry: TensorEntry) -> Words:
    words: Words = _read(entry)
    return words


def read_floats(entry: TensorEntry) -> Floats:
    """Returns a float tensor as float32. Raises ModelError."""
    return as_floats(_read(entry), entry.dtype)


def as_floats(values: NDArray[Any], dtype: str) -> Floats:
    """Returns the values of a float tensor as float32. ``dtype`` is its type in the file."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _floats(values)


def _floats(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _read(entry: TensorEntry) -> NDArray[Any]:
    """Returns a tensor with the shape that it has in its file. One whose rows alternate with others is read with
    them."""
    dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
    count = entry.num_bytes // dtype.itemsize
    if entry.strides is not None:
        count = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True))
    try:
        values = np.fromfile(entry.file, dtype, count, offset=entry.offset)
    except OSError as error:
        raise ModelError(f"{entry.file}: cannot be read ({error}): check the path and its rights") from error
    if values.size != count:
        raise ModelError(f"{entry.file}: became shorter since it was checked: download it again")
    if entry.strides is not None:
        return np.ndarray(entry.shape, dtype, values, 0, tuple(dtype.itemsize * stride for stride in entry.strides))
    return values.reshape(stored_shape(entry.dtype, entry.shape))
