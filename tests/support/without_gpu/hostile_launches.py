"""Launches in Triton's interpreter that are as hostile as a GPU's. Programs run in any order, and the memory of every
tensor ends at a page that cannot be read or written, so that an access past the end ends the process."""

import ctypes
import mmap
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpreterBuilder

from penstock.kernels.cuda.core.launch import ALIGNMENT, KernelVariant

POISON = 0xA5
_C = ctypes.CDLL(None, use_errno=True)


class GuardedCopy:
    """A copy of a tensor's memory. It starts at an aligned address, and what lies around it must not change."""

    def __init__(self, memory: Tensor) -> None:
        size = -(-memory.nbytes // ALIGNMENT) * ALIGNMENT
        room = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, room + mmap.PAGESIZE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        guard = ctypes.c_void_p(whole.data_ptr() + room)
        assert _C.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0, ctypes.get_errno()
        self.start = room - size
        self._memory = memory
        self._all = whole[:room].fill_(POISON)
        self._copy = self._all[self.start : self.start + memory.nbytes].copy_(memory)

    def view(self, tensor: Tensor) -> Tensor:
        """Returns what the tensor is in the copy."""
        offset = tensor.storage_offset() + self.start // tensor.element_size()
        moved = torch.empty(0, dtype=tensor.dtype)
        return moved.set_(self._all.untyped_storage(), offset, tensor.size(), tensor.stride())

    def put_back(self) -> None:
        """Copies the memory back."""
        around = torch.cat((self._all[: self.start], self._all[self.start + self._memory.nbytes :]))
        assert (around == POISON).all(), "a kernel wrote outside of its tensors"
        self._memory.copy_(self._copy)


def make_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, every launch is hostile."""
    _guard_tensors(monkeypatch)
    _shuffle_programs(monkeypatch)


def _guard_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = KernelVariant.launch

    def launch_guarded(self: KernelVariant, grid: tuple[int, ...], *values: Any, **named: Any) -> None:
        named = named or dict(zip(self.arguments, values, strict=True))
        copies: dict[int, GuardedCopy] = {}
        with _disable_current_modes():
            for name, value in named.items():
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    if storage.data_ptr() not in copies:
                        copies[storage.data_ptr()] = GuardedCopy(torch.empty(0, dtype=torch.uint8).set_(storage))
                    named[name] = copies[storage.data_ptr()].view(value)
            launch(self, grid, **named)
            for copy in copies.values():
                copy.put_back()

    monkeypatch.setattr(KernelVariant, "launch", launch_guarded)


def _shuffle_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx
    generator = random.Random(0)
    order: list[int] = []

    def set_shuffled_dim(self: Any, x: int, y: int, z: int) -> None:
        set_grid_dim(self, x, y, z)
        order[:] = range(x * y * z)
        generator.shuffle(order)

    def set_shuffled_idx(self: Any, *_: int) -> None:
        _, y, z = self.grid_dim
        program = order.pop()
        set_grid_idx(self, program // (y * z), program // z % y, program % z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_dim", set_shuffled_dim)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_shuffled_idx)
