"""The types of tensors in GGUF files: how many bytes they take, and what they dequantise to."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models.checkpoint.files.safetensors_header import ELEMENT_BITS
from penstock.models.errors import ModelError

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50), "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "IQ1_M": (256, 56), "TQ1_0": (256, 54),
    "TQ2_0": (256, 66), "MXFP4": (32, 17),
}  # fmt: skip
"""Quantised types: how many elements of a row share a block, and a block's bytes."""

TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""The types that can be loaded, by their numbers in a GGUF file."""


def block_size(dtype: str) -> int:
    """Returns the number of elements of a row that share a block."""
    return BLOCKS[dtype][0] if dtype in BLOCKS else 1


def byte_size(dtype: str, num_elements: int) -> int:
    """Returns the bytes of this many elements, whole blocks of a type in GGUF or safetensors files."""
    if dtype in BLOCKS:
        elements, num_bytes = BLOCKS[dtype]
        return num_elements // elements * num_bytes
    return (num_elements * ELEMENT_BITS[dtype] + 7) // 8


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a tensor as it is stored: that of a quantised one is in bytes."""
    return shape if dtype not in BLOCKS else (*shape[:-1], byte_size(dtype, shape[-1]))


def dequantize(stored: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Returns the values of a tensor with ``stored_shape``. Raises ModelError."""
    # The library imports others that only a file with quantised tensors needs.
    try:
        from gguf import GGMLQuantizationType, quants
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{dtype}: PyPI's gguf, which dequantises this type, is not installed: pip install 'penstock-llm[serve]'"
        ) from error

    if not math.prod(stored.shape):
        return np.empty((*stored.shape[:-1], 0), np.float32)
    values: NDArray[Any] = quants.dequantize(stored, GGMLQuantizationType[dtype])
    return values.astype(np.float32, copy=False)
