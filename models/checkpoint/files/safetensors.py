"""Tensors of safetensors and GGUF files as numpy arrays over the mapped files. Nothing is read before it is used, and
only quantised tensors of GGUF files are copied. Knows no model.
"""

import mmap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.checkpoint.files.ggml import BLOCKS, dequantize, stored_shape
from penstock.models.checkpoint.files.model_files import open_model_file
from penstock.models.checkpoint.files.safetensors_header import TensorEntry
from penstock.models.errors import ModelError

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
"""The numpy type that represents each dtype. numpy has no bfloat16, so its bits are read."""


class TensorFiles:
    """Files of a checked checkpoint, mapped read-only. They stay mapped while one of their arrays is in use."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises ModelError if a file cannot be opened."""
        self._mapped: dict[Path, mmap.mmap] = {}
        for file in sorted(set(files)):
            try:
                # Not copy-on-write: the system would count a file larger than its memory as memory, and refuse it.
                with open(open_model_file(file), "rb") as stream:
                    self._mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{file}: cannot be read ({error}): check the path and its rights") from error

    def array(self, entry: TensorEntry) -> NDArray[Any]:
        """Returns the tensor, with the strides that it has in the file. It may be unaligned. A tensor with an order of
        rows of its own is copied, and a quantised one of a GGUF file becomes float32. Raises ModelError."""
        if entry.dtype in BLOCKS:
            in_bytes = replace(entry, dtype="U8", shape=stored_shape(entry.dtype, entry.shape))
            return dequantize(self.array(in_bytes), entry.dtype)
        dtype = np.dtype(NUMPY_DTYPES[entry.dtype])
        strides = None if entry.strides is None else tuple(dtype.itemsize * stride for stride in entry.strides)
        rows, shape = entry.rows, entry.shape
        try:
            if rows is not None:
                stored = np.ndarray(
                    (int(rows.max()) + 1, *shape[rows.ndim :]), dtype, self._mapped[entry.file], entry.offset
                )
                return stored[rows]
            return np.ndarray(shape, dtype, self._mapped[entry.file], entry.offset, strides)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{entry.file}: became shorter since it was checked: download it again") from error

    def release_pages(self) -> None:
        """Releases the pages that were read, which would count as this process's memory."""
        for mapped in self._mapped.values():
            mapped.madvise(mmap.MADV_DONTNEED)
