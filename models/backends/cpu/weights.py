"""Packs a checkpoint's weights for the CPU library as they are read: each goes from the file's pages straight to its
place, without a copy in between. Uses numpy and the library, no torch."""

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import LANES, Kernels, Matrix, StorageFormat
from penstock.kernels.cpu.program import ElementType, Library, PackedLinear
from penstock.models.architecture.spec import ONES
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.reader import QuantizationError, QuantizedMatrix, read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout, QuantScheme

Floats = NDArray[np.float32]
Addresses = NDArray[np.uint64]

SOURCES = {"F32": ElementType.F32, "BF16": ElementType.BF16, "F16": ElementType.F16, "F64": ElementType.F64}
"""The library's names of the dtypes on disk."""

ALIGNMENT = 64
GROUP = 128
"""Columns that share a scale in int4 quantised at load."""


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix in memory."""

    array: NDArray[np.generic]
    """(rows, columns)."""
    source: ElementType

    @property
    def addresses(self) -> Addresses:
        rows = np.arange(len(self.array), dtype=np.uint64)
        return np.uint64(self.array.ctypes.data) + rows * np.uint64(self.array.strides[0])


class FileTensors:
    """The tensors of a checked checkpoint, in the pages of its files."""

    def __init__(self, info: CheckpointInfo) -> None:
        """Raises ModelError."""
        self._info = info
        self._files = TensorFiles(entry.file for entry in info.tensors.values())

    def quantized(self, name: str) -> QuantizedMatrix | None:
        """Returns the linear's weight if the checkpoint contains it quantised in a form that is kept."""
        linear = self._info.quantized.get(name)
        return None if linear is None or not is_kept(linear.scheme) else read_matrix(linear)

    def rows(self, name: str, shape: tuple[int, ...]) -> Rows:
        """Returns a matrix, or a vector as one row. Its data is read when it is used, but fp8 is dequantised here."""
        linear = self._info.quantized.get(name.removesuffix(".weight"))
        if linear is not None:
            return Rows(read_matrix(linear).dequantized(), ElementType.F32)
        entry = self._info.tensors[name]
        array = self._files.array(entry)
        # Quantised tensors of GGUF files are float32 by now.
        source = SOURCES.get(entry.dtype, ElementType.F32)
        if factors := self._info.spec.factors_of(name):
            array, source = widened(array, source), ElementType.F32
            for each in factors:
                array[each.rows] *= np.float32(each.factor)
        return Rows(array if array.ndim == 2 else array[None], source)

    def done(self) -> None:
        """Marks all data read before this call as no longer needed."""
        self._files.release_pages()


class DummyTensors:
    """Random weights for benchmarks, the same every time and in every stage: normal matrices, norms of one, and zeros
    elsewhere."""

    def quantized(self, name: str) -> QuantizedMatrix | None:
        return None

    def rows(self, name: str, shape: tuple[int, ...]) -> Rows:
        ones = name.endswith(ONES)
        if len(shape) >= 2 and not ones:
            generator = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
            drawn = generator.standard_normal(shape, dtype=np.float32)
            drawn *= np.float32(0.02)
            return Rows(drawn, ElementType.F32)
        return Rows(np.full((1, *shape)[-2:], 1.0 if ones else 0.0, dtype=np.float32), ElementType.F32)

    def done(self) -> None:
        """Does nothing: no data is kept."""


Tensors = FileTensors | DummyTensors


@dataclass
class Packer:
    """Writes weights into the library's memory, one after another."""

    library: Library
    kernels: Kernels
    tensors: Tensors
    format: StorageFormat
    """The default format of products."""
    address: int
    end: int
    error: QuantizationError = field(default_factory=QuantizationError)
    kept: list[NDArray[np.generic]] = field(default_factory=list)
    """Arrays that the library reads in place."""

    def vector(self, name: str, shape: int | tuple[int, ...], offset: float = 0.0, factor: float = 1.0) -> int:
        """Returns the address of a vector, or of vectors one after another, in float32, with ``offset`` added to each
        entry, which is then multiplied by ``factor``."""
        floats = self.floats(name, shape if isinstance(shape, tuple) else (shape,))
        return self.keep((floats + np.float32(offset)) * np.float32(factor))

    def number(self, name: str) -> float:
        """Returns the only entry of a tensor."""
        return float(self.floats(name, (1,))[0, 0])

    def keep(self, array: NDArray[np.generic]) -> int:
        self.kept.append(np.ascontiguousarray(array))
        return self.kept[-1].ctypes.data

    def table(self, name: str, shape: tuple[int, int], wide: bool) -> int:
        """Returns the address of a matrix whose rows are looked up: float32 if ``wide``, else bfloat16."""
        rows = self.tensors.rows(name, shape)
        itemsize = 4 if wide else 2
        address = self._take(shape[0] * shape[1] * itemsize)
        memory = memoryview((ctypes.c_uint8 * (shape[0] * shape[1] * itemsize)).from_address(address))
        out = np.ndarray(shape, "<f4" if wide else "<u2", memory)
        for begin in range(0, shape[0], 4096):
            part = rows.array[begin : begin + 4096]
            if wide:
                out[begin : begin + 4096] = widened(part, rows.source)
            else:
                kept = part if rows.source is ElementType.BF16 else narrowed(widened(part, rows.source))
                out[begin : begin + 4096] = kept
        self.tensors.done()
        return address

    def linear(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        biased: bool,
        *,
        gated: bool = False,
        format: StorageFormat | None = None,
    ) -> PackedLinear:
        """Packs several linears on the same inputs, as one matrix if they are alike: their rows stacked, or alternating
        panel by panel if ``gated``. ``format`` replaces the default one."""
        quantized = [self.tensors.quantized(name) for name in names]
        biases = [self.floats(f"{name}.bias", (n,))[0] if biased else None for name, n in zip(names, rows, strict=True)]
        kind = self.format if format is None else format
        if all(part is None for part in quantized):
            sources = [self.tensors.rows(f"{name}.weight", (n, columns)) for name, n in zip(names, rows, strict=True)]
            return _joined([self.float_matrix(sources, columns, biases, gated, kind)])
        codes = [part for part in quantized if part is not None]
        if len(codes) == len(names) and all(map(codes[0].is_alike, codes)):
            return _joined([self._codes_matrix(codes, biases, gated)])
        parts = []
        for name, part, n, bias in zip(names, quantized, rows, biases, strict=True):
            if part is None:
                source = self.tensors.rows(f"{name}.weight", (n, columns))
                parts.append(self.float_matrix([source], columns, [bias], False, kind))
            else:
                parts.append(self._codes_matrix([part], [bias], False))
        return _joined(parts)

    def float_matrix(
        self, parts: list[Rows], columns: int, biases: Sequence[Floats | None], gated: bool, kind: StorageFormat
    ) -> Matrix:
        """Packs the rows of parts as one matrix, stacked or in turns."""
        order = _order([len(part.array) for part in parts], gated)
        matrix = self.matrix(kind, len(order), columns, group_made(kind), _rearranged(biases, order))
        if len({(part.source, part.array.strides[1]) for part in parts}) > 1:  # a checkpoint in several dtypes
            parts = [Rows(np.ascontiguousarray(widened(part.array, part.source)), ElementType.F32) for part in parts]
        addresses = np.concatenate([part.addresses for part in parts])
        errors = self.library.pack(
            self.kernels, matrix, _placed(addresses, order), parts[0].source, parts[0].array.strides[1]
        )
        self.error.squared_error += errors[0]
        self.error.squared_weights += errors[1]
        self.tensors.done()
        return matrix

    def _codes_matrix(self, parts: list[QuantizedMatrix], biases: Sequence[Floats | None], gated: bool) -> Matrix:
        codes, scales, zeros = (
            np.concatenate(arrays)
            for arrays in zip(*((part.codes, part.scales, part.zeros) for part in parts), strict=True)
        )
        kind, group = stored_format(parts[0].scheme, codes.shape[1])
        order = _order([len(part.codes) for part in parts], gated)
        matrix = self.matrix(kind, len(order), codes.shape[1], group, _rearranged(biases, order))
        if parts[0].order is not None:
            matrix.order = self.keep(parts[0].order)
        addresses = [_placed(Rows(part, ElementType.F32).addresses, order) for part in (codes, scales, zeros)]
        self.library.pack_codes(self.kernels, matrix, *addresses)
        self.tensors.done()
        return matrix

    def matrix(self, format: StorageFormat, rows: int, columns: int, group: int, bias: Floats | None) -> Matrix:
        """Allocates an empty matrix in the library's memory."""
        panels = -(-rows // LANES)
        panel_bytes = self.kernels.panel_bytes(format, columns, group)
        address = self._take(panels * panel_bytes)
        padded = None
        if bias is not None:
            padded = np.zeros(panels * LANES, dtype=np.float32)
            padded[: len(bias)] = bias
        return Matrix(
            format=format, rows=rows, columns=columns, group=group, panel_bytes=panel_bytes, panels=address,
            bias=None if padded is None else self.keep(padded), order=None,
        )  # fmt: skip

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Returns a tensor in float32."""
        rows = self.tensors.rows(name, shape)
        return np.array(widened(rows.array, rows.source))

    def _take(self, num_bytes: int) -> int:
        address = -(-self.address // ALIGNMENT) * ALIGNMENT
        self.address = address + num_bytes
        assert self.address <= self.end, "more memory was allocated than weights can need"
        return address


def group_made(format: StorageFormat) -> int:
    """Returns the columns that share a scale in a matrix quantised at load."""
    return GROUP if format is StorageFormat.INT4 else 0


def is_kept(scheme: QuantScheme) -> bool:
    """Whether weights stay as they are quantised in the checkpoint. Those in fp8 and NVFP4, and in eight bits by GPTQ,
    are dequantised."""
    return scheme.layout not in (QuantLayout.FP8, QuantLayout.NVFP4) and not scheme.is_wide


def stored_format(scheme: QuantScheme, columns: int) -> tuple[StorageFormat, int]:
    """Returns the packed format and panel group of a matrix that stays as it is in the checkpoint."""
    if scheme.bits == 8:
        return StorageFormat.INT8, 0
    if scheme.is_float:
        return StorageFormat.FP4, scheme.group
    if scheme.layout is QuantLayout.Q4_0:
        return StorageFormat.Q4_0, scheme.group
    return StorageFormat.INT4, scheme.group or -(-columns // 32) * 32


def _order(sizes: Sequence[int], gated: bool) -> NDArray[np.int64]:
    """Returns, for each row of the matrix, its index in the stacked parts; -1 for a row of zeros that pads a panel."""
    if not gated:
        return np.arange(sum(sizes))
    gate, up = sizes
    assert gate == up, "a gate for each"
    padded = np.full((2, -(-gate // LANES) * LANES), -1, dtype=np.int64)
    padded[0, :gate] = np.arange(gate)
    padded[1, :gate] = gate + np.arange(gate)
    return padded.reshape(2, -1, LANES).swapaxes(0, 1).reshape(-1)


def _placed(addresses: Addresses, order: NDArray[np.int64]) -> Addresses:
    """Returns addresses in the matrix's order, up to the end of the last panel; 0 where there is no row."""
    placed = np.zeros(-(-len(order) // LANES) * LANES, dtype=np.uint64)
    placed[: len(order)] = np.where(order < 0, np.uint64(0), addresses[order])
    return placed


def _rearranged(biases: Iterable[Floats | None], order: NDArray[np.int64]) -> Floats | None:
    parts = [bias for bias in biases if bias is not None]
    if not parts:
        return None
    joined = np.concatenate(parts)
    return np.where(order < 0, np.float32(0.0), joined[order]).astype(np.float32)


def _joined(parts: list[Matrix]) -> PackedLinear:
    linear = PackedLinear(num_parts=len(parts))
    for index, part in enumerate(parts):
        linear.parts[index] = part
    return linear


def widened(array: NDArray[np.generic], source: ElementType) -> Floats:
    """Returns the array as float32."""
    if source is ElementType.BF16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def narrowed(array: Floats) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
