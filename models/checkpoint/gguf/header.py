"""Reads and checks the header of a GGUF file without reading the tensors. Knows no model.

The file is mapped, and nothing is allocated before it is known to be in the file. The reader of PyPI's ``gguf`` trusts
the sizes in a file, and makes an array of each token.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.models.checkpoint.files.ggml import TYPES, block_size, byte_size
from penstock.models.checkpoint.files.model_files import open_model_file
from penstock.models.checkpoint.files.safetensors_header import MAX_NAME_CHARS, MAX_TENSORS, TensorEntry
from penstock.models.errors import ModelError

MAX_HEADER_BYTES = 256 << 20
"""The limit for everything before the tensors. With 262,144 tokens it is a twentieth of this."""
MAX_FIELDS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22
"""The limit for one array. The longest known ones, lists of merges, have an eighth of this."""
MAX_DIMENSIONS = 4
VERSIONS = (2, 3)

_ALIGNMENT = "general.alignment"
_MAGIC = b"GGUF"
_FETCH = "download the file again"
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The numpy type that represents each type of field."""
_SHORT_ARRAY = 4096
"""Longer arrays are those of a tokenizer, which the check of a model does not need."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of one file, or of all files of a model that is split."""

    path: Path
    metadata: Mapping[str, Any]
    """The fields by key; without long arrays, unless ``read_header`` returns these too."""
    lengths: Mapping[str, int]
    """The number of items of every array, by key."""
    tensors: Mapping[str, TensorEntry]


def read_header(file: Path, long_arrays: bool = False) -> GgufHeader:
    """Returns the header of one file. Raises ModelError unless it is complete and its tensors are in the file."""
    try:
        with open(open_model_file(file), "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            if length < 24:
                raise damaged(file, f"it is {length} bytes long, which is too short for a header")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _Reader(file, mapped, long_arrays).header()
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be read ({os.strerror(error.errno or 0)}): check the path and its rights"
        ) from error


def damaged(file: Path, what: str) -> ModelError:
    """The error for a file that breaks a rule of the format."""
    return ModelError(f"{file}: {what}: {_FETCH}")


class _Reader:
    """Reads a mapped file from its beginning."""

    def __init__(self, file: Path, data: mmap.mmap, long_arrays: bool) -> None:
        self._file, self._data, self._long_arrays = file, data, long_arrays
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._at = 0
        self._lengths: dict[str, int] = {}

    def header(self) -> GgufHeader:
        magic = bytes(self._data[:4])
        if magic != _MAGIC:
            raise ModelError(f"{self._file}: is not a GGUF file: it begins with {magic!r}: give another")
        self._at = 4
        version = self._number("<I")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise ModelError(
                    f"{self._file}: is big-endian: convert it with gguf-convert-endian, or download another"
                )
            raise ModelError(f"{self._file}: has version {version} of GGUF, and must have 2 or 3: download another")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        if num_tensors > MAX_TENSORS:
            raise self._damaged(f"it has {num_tensors:,} tensors, and a file may have {MAX_TENSORS:,}")
        if num_fields > MAX_FIELDS:
            raise self._damaged(f"it has {num_fields:,} fields, and a file may have {MAX_FIELDS:,}")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            self._read_field(metadata)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"{_ALIGNMENT} is {str(alignment)[:60]}, and must be a power of two")
        return GgufHeader(self._file, metadata, self._lengths, self._placed(found, alignment))

    def _read_field(self, metadata: dict[str, Any]) -> None:
        key = self._string("a field's name", MAX_NAME_CHARS)
        if key in metadata or key in self._lengths:
            raise self._damaged(f"field {key} comes twice")
        kind = self._number("<I")
        if kind == _ARRAY:
            item, count = self._number("<I"), self._number("<Q")
            if count > MAX_ARRAY_ITEMS:
                raise self._damaged(f"field {key} has {count:,} items, and may have {MAX_ARRAY_ITEMS:,}")
            self._lengths[key] = count
            values = self._array(key, item, count, self._long_arrays or count <= _SHORT_ARRAY)
            if values is not None:
                metadata[key] = values
        elif kind == _STRING:
            metadata[key] = self._string(f"field {key}", self._end)
        else:
            [value] = self._items(key, kind, 1)
            # The shortest number that rounds to the same float32, which is the one that the config had.
            metadata[key] = float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self, key: str, kind: int, count: int, is_kept: bool) -> list[Any] | None:
        if kind != _STRING:
            if is_kept:
                return self._items(key, kind, count)
            self._take(count * self._dtype(key, kind).itemsize, f"field {key}")
            return None
        what = f"field {key}"
        at, end, data, unpack = self._at, self._end, self._data, struct.Struct("<Q").unpack_from
        strings: list[Any] = []
        for _ in range(count):  # half a million of them, so each has to be quick
            begin = at + 8
            at = begin + unpack(data, at)[0] if begin <= end else begin
            if at > end:
                raise self._cut_off(what)
            if is_kept:
                strings.append(data[begin:at])
        self._at = at
        try:
            return [str(string, "utf-8") for string in strings] if is_kept else None
        except UnicodeDecodeError:
            raise self._damaged(f"{what} has an item that is not UTF-8") from None

    def _items(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = self._dtype(key, kind)
        begin = self._take(count * dtype.itemsize, f"field {key}")
        values: list[Any] = np.frombuffer(self._data[begin : self._at], dtype).tolist()
        return values

    def _dtype(self, key: str, kind: int) -> "np.dtype[Any]":
        if kind not in _SCALARS:
            raise self._damaged(f"field {key} has the unknown type {kind}")
        return np.dtype(_SCALARS[kind])

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Returns a tensor's name, type, shape and offset in the data."""
        name = self._string("a tensor's name", MAX_NAME_CHARS)
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions:,} dimensions, and may have {MAX_DIMENSIONS}")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in TYPES:
            raise ModelError(
                f"{self._file}: tensor {name} has the type {kind}, which is not supported: use a file in another type, "
                "such as Q8_0 or Q4_0"
            )
        dtype = TYPES[kind]
        has_blocks = block_size(dtype) > 1
        is_whole = shape[-1] % block_size(dtype) == 0 and (len(shape) > 1 or not has_blocks)
        if not all(0 < size < 1 << 40 for size in shape) or not is_whole:
            raise self._damaged(f"tensor {name} ({dtype}) has the shape {list(shape)}")
        return name, dtype, shape, offset

    def _placed(self, found: list[tuple[str, str, tuple[int, ...], int]], alignment: int) -> dict[str, TensorEntry]:
        """Returns the tensors, which must be inside of the file and must not overlap."""
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, dtype, shape, offset in found:
            if name in tensors:
                raise self._damaged(f"tensor {name} comes twice")
            num_bytes = byte_size(dtype, math.prod(shape))
            tensors[name] = TensorEntry(self._file, dtype, shape, begin + offset, num_bytes)
        reached = begin
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].offset):
            end = entry.offset + entry.num_bytes
            if end > len(self._data):
                raise self._damaged(
                    f"it is cut off: tensor {name} ends at byte {end:,}, and the file has {len(self._data):,} bytes"
                )
            if entry.offset < reached or entry.offset % alignment:
                raise self._damaged(f"tensor {name} has the offset {entry.offset - begin:,}, where it overlaps another")
            reached = end
        return tensors

    def _string(self, what: str, max_bytes: int) -> str:
        length = self._number("<Q")
        if length > max_bytes:
            raise self._damaged(f"{what} has {length:,} bytes")
        begin = self._take(length, what)
        try:
            return str(self._data[begin : self._at], "utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not UTF-8") from None

    def _number(self, form: str) -> int:
        begin = self._take(struct.calcsize(form), "its header")
        [number] = struct.unpack_from(form, self._data, begin)
        return int(number)

    def _take(self, num_bytes: int, what: str) -> int:
        """Goes on by this many bytes and returns where they begin."""
        begin = self._at
        if num_bytes > self._end - begin:
            raise self._cut_off(what)
        self._at = begin + num_bytes
        return begin

    def _cut_off(self, what: str) -> ModelError:
        if self._end == len(self._data):
            return self._damaged(f"it is cut off in {what}")
        return self._damaged(f"{what} reaches beyond {MAX_HEADER_BYTES >> 20} MiB, the limit for a header")

    def _damaged(self, what: str) -> ModelError:
        return damaged(self._file, what)
