"""The host tier of the KV cache: pages in host memory, for blocks evicted from the device."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.models.backends.memory import num_host_blocks
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerConfig

MEASURED_BLOCKS, MEASUREMENTS = 64, 3
PIECE_BYTES = 16 << 20
"""The size of allocations of pinned memory."""


class HostSlots:
    """The slots of one of the tensors that a block has."""

    def __init__(self, num_slots: int, pages: Tensor) -> None:
        """``pages`` are those on the device, (num_blocks, ...)."""
        shape, is_pinned = pages.shape[1:], pages.device.type == "cuda"
        # torch rounds each pinned allocation up to a power of two. If all slots were one allocation, up to half of the
        # memory would be lost.
        self._per_piece = max(PIECE_BYTES // (shape.numel() * pages.element_size()), 1) if is_pinned else num_slots
        self._pieces = [
            torch.empty((min(self._per_piece, num_slots - begin), *shape), dtype=pages.dtype, pin_memory=is_pinned)
            for begin in range(0, num_slots, self._per_piece or 1)
        ]

    def __getitem__(self, slot: int) -> Tensor:
        return self._pieces[slot // self._per_piece][slot % self._per_piece]


class HostPages:
    """Slots that hold one block each, bit for bit as on the device, contiguous for each of its tensors.

    With a GPU the memory is pinned, so that copies block no thread; otherwise it is allocated when a slot is first
    used. Copies run in order with the device's other work.
    """

    def __init__(self, blocks: Sequence[Tensor], num_slots: int) -> None:
        """``blocks`` are views of the device's pages, each (num_blocks, ...)."""
        self.num_slots = num_slots
        self._blocks = blocks
        self._device = blocks[0].device
        self._slots = [HostSlots(num_slots, pages) for pages in blocks]

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        for blocks, slots in zip(self._blocks, self._slots, strict=True):
            for block, slot in copies:
                slots[slot].copy_(blocks[block], non_blocking=True)

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        for blocks, slots in zip(self._blocks, self._slots, strict=True):
            for slot, block in copies:
                blocks[block].copy_(slots[slot], non_blocking=True)

    def measure_copy_us(self) -> float:
        """Returns roughly how long a copy of one block takes in either direction, the best of a few tries; 0 without
        slots. Must be called before blocks and slots are in use."""
        num = min(MEASURED_BLOCKS, self.num_slots, len(self._blocks[0]))
        if not num:
            return 0.0
        copies = [(index, index) for index in range(num)]
        self.copy_out(copies)  # the first time, memory may have to be allocated
        best_s = min(self._copy_in_and_out_s(copies) for _ in range(MEASUREMENTS))
        return best_s * 1e6 / (2 * num)

    def _copy_in_and_out_s(self, copies: list[tuple[int, int]]) -> float:
        self._wait()
        began = time.perf_counter()
        self.copy_in(copies)
        self.copy_out(copies)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def take_host_pages(config: WorkerConfig, blocks: Sequence[Tensor], block_bytes: int, kv_bytes: int) -> HostPages:
    """Allocates the slots that the config has room for, besides ``kv_bytes`` on the device. Raises ModelError."""
    num_slots = num_host_blocks(config, block_bytes, kv_bytes)
    try:
        return HostPages(blocks, num_slots)
    except RuntimeError as error:  # raised by torch if memory runs out
        wanted = config.host_kv_cache_bytes
        raise ModelError(f"--host-kv-cache-bytes {wanted}: the host cannot allocate this: give less") from error
