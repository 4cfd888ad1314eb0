"""LoRA adapters on the CUDA kernels: a step's tokens in tiles, at fixed addresses, so that a graph can read them."""

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cuda.lora import TILE, LoraTiles, add_lora
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cuda.steps.step_io import Size
from penstock.models.backends.torch_common.adapters import SlotMatrices, TorchAdapters
from penstock.models.batch.batch import Batch


class CudaAdapters(TorchAdapters):
    """The slots of a loaded model, and the tiles of the current step."""

    def __init__(
        self,
        spec: ModelSpec,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, max_loras, max_rank, dtype, device)
        self._max_loras = max_loras
        self._tiles = LoraTiles(torch.empty(0), torch.empty(0))
        self._num_tiles = 0
        """The number of tiles of the step that is launched, or captured; 0: no token has an adapter."""

    def take_room(self, max_tokens: int) -> None:
        """Allocates the tiles of steps of at most ``max_tokens``."""
        most = self._most_tiles(max_tokens)
        self._tiles = LoraTiles(
            torch.full((most * TILE,), -1, dtype=torch.int32, device=self.device),
            torch.zeros(most, dtype=torch.int32, device=self.device),
        )

    def _most_tiles(self, num_tokens: int) -> int:
        """Returns how many tiles that many tokens need at most: each adapter has one that is not full."""
        return min(num_tokens, num_tokens // TILE + self._max_loras)

    def write(self, batch: Batch, size: Size) -> None:
        """Writes the tiles of a batch, for a step of that size with adapters."""
        slots = batch.adapters
        assert slots is not None
        num_tiles = self._most_tiles(size.tokens)
        pinned = self.device.type == "cuda"
        host = torch.zeros(num_tiles * (TILE + 1), dtype=torch.int32, pin_memory=pinned)
        array = host.numpy()
        tokens, of_tiles = array[: num_tiles * TILE].reshape(num_tiles, TILE), array[num_tiles * TILE :]
        tokens.fill(-1)
        tile = 0
        for slot in np.unique(slots[slots > 0]).tolist():
            found = np.flatnonzero(slots == slot)
            for begin in range(0, len(found), TILE):
                part = found[begin : begin + TILE]
                tokens[tile, : len(part)], of_tiles[tile] = part, slot
                tile += 1
        self._tiles.tokens[: num_tiles * TILE].copy_(host[: num_tiles * TILE], non_blocking=pinned)
        self._tiles.slots[:num_tiles].copy_(host[num_tiles * TILE :], non_blocking=pinned)

    def launch(self, size: Size) -> None:
        """Makes the layers that are launched next those of a step of that size."""
        self._num_tiles = self._most_tiles(size.tokens) if size.adapted else 0

    @property
    def is_active(self) -> bool:
        return self._num_tiles > 0

    def add(self, matrices: SlotMatrices, x: Tensor, y: Tensor) -> None:
        tiles = LoraTiles(self._tiles.tokens[: self._num_tiles * TILE], self._tiles.slots[: self._num_tiles])
        # With gated attention, only keys and values have adapters, and are a copy for the kernels.
        part = y[:, matrices.start : matrices.start + matrices.ends[-1]]
        out = part.contiguous()
        add_lora(x, matrices.a, matrices.b, matrices.ends, tiles, out)
        if out is not part:
            part.copy_(out)
