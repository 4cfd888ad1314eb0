"""Reads the tensors of a checkpoint into torch, or makes them up."""

import warnings
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.models.architecture.spec import ONES
from penstock.models.checkpoint.files.safetensors import TensorFiles
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.reader import read_matrix

Part = tuple[slice, ...]
"""A part of a tensor: a slice for each of its first dimensions; empty for the whole."""
WHOLE: Part = ()


class FileSource:
    """The tensors of a checked checkpoint."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info
        self._files = TensorFiles(entry.file for entry in info.tensors.values())

    def fill(self, name: str, out: Tensor, part: Part = WHOLE) -> None:
        """Copies a part of a tensor into ``out``, which has its shape, casting or dequantising it as needed."""
        linear = self._info.quantized.get(name.removesuffix(".weight"))
        if linear is not None:
            out.copy_(torch.from_numpy(read_matrix(linear).dequantized()[part]))
            return
        entry = self._info.tensors[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
            values = torch.from_numpy(self._files.array(entry)[part])
        out.copy_(values.view(torch.bfloat16) if entry.dtype == "BF16" else values)
        for each in self._info.spec.factors_of(name):
            out[each.rows] *= each.factor


class DummySource:
    """Random weights for benchmarks: matrices are normal with a small deviation, norms are one, and everything else is
    zero. They are the same every time, however many ranks and stages share them."""

    def __init__(self, info: CheckpointInfo, device: torch.device) -> None:
        self._shapes: Mapping[str, tuple[int, ...]] = dict(info.spec.tensors())
        self._generator = torch.Generator(device)

    def fill(self, name: str, out: Tensor, part: Part = WHOLE) -> None:
        ones = name.endswith(ONES)
        if out.ndim >= 2 and not ones:
            whole = out if out.shape == self._shapes[name] else out.new_empty(self._shapes[name])
            whole.normal_(std=0.02, generator=self._generator.manual_seed(zlib.crc32(name.encode())))
            if whole is not out:
                out.copy_(whole[part])
        else:
            out.fill_(1.0 if ones else 0.0)
