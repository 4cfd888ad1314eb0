"""The slots of LoRA adapters in the CPU library's memory."""

import ctypes
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import LANES, Kernels, Matrix, StorageFormat
from penstock.kernels.cpu.program import DecoderModel, ElementType, Library, LoraPair
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cpu.weights import ALIGNMENT, Rows
from penstock.models.checkpoint.lora.adapter import MODULES, AdaptedLinear, LoraAdapter, adapted_linears


class CpuAdapters:
    """The matrices of the adapters in all slots. They are in bfloat16, or in float32 if the model's floats are."""

    def __init__(
        self, library: Library, kernels: Kernels, spec: ModelSpec, format: StorageFormat, max_loras: int, max_rank: int
    ) -> None:
        """Commits the memory, so that it counts as used. Raises MemoryError."""
        self._kernels, self._format, self._max_rank = kernels, format, max_rank
        self._num_layers = spec.num_layers
        self._offsets, self._slot_bytes = _places(spec, kernels, format, max_rank)
        self._memory = library.memory(max_loras * self._slot_bytes)
        self._memory.populate(0, self._memory.num_bytes)
        self._pairs = (LoraPair * (max_loras * spec.num_layers * len(MODULES)))()
        self._packing: Library | None = None
        """The thread that packs, while steps have the others."""

    def attach(self, model: DecoderModel) -> None:
        """Makes the model's steps use the slots. They must outlive its program."""
        model.adapters = ctypes.addressof(self._pairs)
        model.adapter_format, model.adapter_rank = self._format, self._max_rank

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter into a slot that no step uses. Raises ModelError."""
        if self._packing is None:
            self._packing = Library(1)
        size = self._num_layers * len(MODULES)
        for index in range((slot - 1) * size, slot * size):
            self._pairs[index] = LoraPair()
        start = self._memory.address + (slot - 1) * self._slot_bytes
        for linear, (a, b) in adapter.matrices():
            address = start + self._offsets[linear]
            of_a = self._packed(a, address, self._packing)
            of_b = self._packed(b, _aligned(address + self._num_bytes(*a.shape)), self._packing)
            index = (slot - 1) * size + linear.layer * len(MODULES) + MODULES.index(linear.module)
            self._pairs[index] = LoraPair(of_a, of_b)

    def _packed(self, array: NDArray[np.float32], address: int, library: Library) -> Matrix:
        rows, columns = array.shape
        matrix = Matrix(
            format=self._format, rows=rows, columns=columns, group=0,
            panel_bytes=self._kernels.panel_bytes(self._format, columns, 0), panels=address, bias=None, order=None,
        )  # fmt: skip
        addresses = np.zeros(-(-rows // LANES) * LANES, dtype=np.uint64)
        addresses[:rows] = Rows(array, ElementType.F32).addresses
        library.pack(self._kernels, matrix, addresses, ElementType.F32, array.strides[1])
        return matrix

    def _num_bytes(self, rows: int, columns: int) -> int:
        return _num_bytes(self._kernels, self._format, rows, columns)


def adapter_bytes(kernels: Kernels, spec: ModelSpec, format: StorageFormat, max_loras: int, max_rank: int) -> int:
    """Returns the memory that the slots need."""
    return max_loras * _places(spec, kernels, format, max_rank)[1]


def _places(
    spec: ModelSpec, kernels: Kernels, format: StorageFormat, max_rank: int
) -> tuple[Mapping[AdaptedLinear, int], int]:
    """Returns where in a slot each linear's matrices begin, at the largest rank, and the size of a slot."""
    offsets, size = {}, 0
    for linear, (rows, columns) in adapted_linears(spec).items():
        offsets[linear] = size
        a, b = (_num_bytes(kernels, format, *shape) for shape in ((max_rank, columns), (rows, max_rank)))
        size = _aligned(_aligned(size + a) + b)
    return offsets, size


def _num_bytes(kernels: Kernels, format: StorageFormat, rows: int, columns: int) -> int:
    return -(-rows // LANES) * int(kernels.panel_bytes(format, columns, 0))


def _aligned(address: int) -> int:
    return -(-address // ALIGNMENT) * ALIGNMENT
