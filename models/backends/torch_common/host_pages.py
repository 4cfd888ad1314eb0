"""The second tier of the KV cache: pages in host memory, for blocks that the device had no room for. Knows no rows and
no plans."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.models.backends.memory import num_host_blocks
from penstock.models.errors import ModelError
from penstock.scheduler.plan import WorkerConfig

MEASURED_BLOCKS, MEASUREMENTS = 64, 3


class HostPages:
    """Slots that hold a block each, bit for bit as on the device, and in one piece for each of its tensors.

    Beside a GPU the memory is pinned, so that nobody waits for copies; otherwise it is taken when a slot is first used.
    Copies are made in the order of the device's other work.
    """

    def __init__(self, blocks: Sequence[Tensor], num_slots: int) -> None:
        """``blocks``: views of the device's pages, each (num_blocks, ...)."""
        self.num_slots = num_slots
        self._blocks = blocks
        self._device = blocks[0].device
        pinned = self._device.type == "cuda" and num_slots > 0
        self._slots = [
            torch.empty((num_slots, *pages.shape[1:]), dtype=pages.dtype, pin_memory=pinned) for pages in blocks
        ]

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """From blocks to slots."""
        for blocks, slots in zip(self._blocks, self._slots, strict=True):
            for block, slot in copies:
                slots[slot].copy_(blocks[block], non_blocking=True)

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        """From slots to blocks."""
        for blocks, slots in zip(self._blocks, self._slots, strict=True):
            for slot, block in copies:
                blocks[block].copy_(slots[slot], non_blocking=True)

    def measure_copy_us(self) -> float:
        """What copying one block takes, either way, about: the best of a few tries. For before anybody has a block or a
        slot; 0 without slots."""
        num = min(MEASURED_BLOCKS, self.num_slots, len(self._blocks[0]))
        if not num:
            return 0.0
        copies = [(index, index) for index in range(num)]
        self.copy_out(copies)  # the first time, memory may have to be taken
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
    """As many slots of ``block_bytes`` as the config has room for, beside ``kv_bytes`` on the device. Raises
    ModelError."""
    num_slots = num_host_blocks(config, block_bytes, kv_bytes)
    try:
        return HostPages(blocks, num_slots)
    except RuntimeError as error:  # of torch's, for want of memory
        wanted = config.host_kv_cache_bytes
        raise ModelError(f"--host-kv-cache-bytes {wanted}: the host cannot allocate them: give less") from error
