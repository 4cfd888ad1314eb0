"""Reads and checks the headers of safetensors files without reading the tensors. Independent of models."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.models.checkpoint.files.model_files import open_model_file
from penstock.models.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""The limit that the format defines."""

MAX_TENSORS = 1 << 20
"""The limit for one file. A model with a trillion parameters has a tenth of this in all its files together."""
MAX_DIMENSIONS = 16
MAX_NAME_CHARS = 1024
_MAX_SHOWN = 60

ELEMENT_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16,
    "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's location and type."""

    file: Path
    dtype: str
    """The name in safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]
    offset: int
    """The position of its first byte in the file."""
    num_bytes: int
    strides: tuple[int, ...] | None = None
    """Elements from one index to the next in each dimension, for parts of other tensors; None: contiguous."""
    rows: NDArray[np.int64] | None = field(default=None, compare=False)
    """The rows of the stored tensor, from ``offset`` on, that this one consists of, in the shape of its first
    dimensions; None: the tensor is stored as it is."""

    def check_shape(self, name: str, shape: tuple[int, ...], source: str, kind: str = "models") -> None:
        """Raises ModelError unless the tensor has the shape that ``source`` calls for."""
        if self.shape != shape:
            raise ModelError(
                f"{self.file}: tensor {name} has the shape {list(self.shape)}, and {source} calls for {list(shape)}: "
                f"config and weights belong to different {kind}"
            )


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of one file. Raises ModelError unless their offsets cover the file exactly."""
    try:
        with open(open_model_file(file), "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, length - 8):
                raise _damaged(file, f"it is {length} bytes long, and its header claims {header_bytes}")
            header = msgspec.json.decode(stream.read(header_bytes), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise ModelError(
            f"{file}: cannot be read ({os.strerror(error.errno or 0)}): check the path and its rights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not a JSON object") from error
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _damaged(file, f"it has {len(header):,} tensors, and a file may have {MAX_TENSORS:,}")
    spans = []
    entries = {}
    for name, value in header.items():
        if len(name) > MAX_NAME_CHARS:
            raise _damaged(file, f"tensor {name[:_MAX_SHOWN]}... has a name of {len(name):,} characters")
        begin, end, entries[name] = _entry(file, name, value, 8 + header_bytes)
        spans.append((begin, end, name))
    _check_spans(file, spans, length - 8 - header_bytes)
    return entries


def _entry(file: Path, name: str, raw: msgspec.Raw, data_offset: int) -> tuple[int, int, TensorEntry]:
    """Returns a tensor's begin and end in the data, which starts at ``data_offset`` of the file, and its entry."""
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _damaged(file, f"the header's entry {name} is not a JSON object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise _damaged(file, f"tensor {name} has the unknown dtype {repr(dtype)[:_MAX_SHOWN]}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise _damaged(file, f"tensor {name} has the shape {str(shape)[:60]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise _damaged(file, f"tensor {name} has the data_offsets {str(offsets)[:60]}")
    begin, end = offsets
    num_bytes = (math.prod(shape) * ELEMENT_BITS[dtype] + 7) // 8
    if end - begin != num_bytes:
        raise _damaged(
            file, f"tensor {name} ({dtype} {shape}) needs {num_bytes} bytes and its data_offsets {offsets} differ"
        )
    return begin, end, TensorEntry(file, dtype, tuple(shape), data_offset + begin, num_bytes)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _check_spans(file: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Checks that the tensors follow each other without gaps or overlaps up to the end of the file."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            what = "overlaps the one before" if begin < reached else "leaves a gap before it"
            raise _damaged(file, f"tensor {name} {what} (data_offsets [{begin}, {end}])")
        reached = end
    if reached != data_bytes:
        what = "is truncated" if reached > data_bytes else "has bytes that no tensor owns"
        raise _damaged(file, f"it {what}: its tensors need {reached} bytes of data, and {data_bytes} are there")


def _damaged(file: Path, what: str) -> ModelError:
    return ModelError(f"{file}: {what}: download the file again")
