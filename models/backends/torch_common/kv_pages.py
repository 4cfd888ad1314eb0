"""The KV cache's tensors: pages of keys and values, or of latents, for every layer, addressed by block id."""

import torch
from torch import Tensor

from penstock.kernels.reference.ops import gather_kv, write_kv
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.kv_groups import KvGroups


class KVPages:
    """Pages of ``block_size`` slots for each layer that has keys and values of its own. Latents are keys and values in
    one: their pages are those of keys. One extra page stays zero: tables are padded with it.

    Memory is allocated when a block is first used: until ``reset_blocks``, a page's content is undefined.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        part: range | None = None,
        groups: KvGroups | None = None,
    ) -> None:
        """``part``: only for these layers. ``groups`` are those of the layers; None: there is one."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.keys: dict[int, Tensor] = {}
        """The pages of each layer, (kv heads, num_blocks + 1, block_size, head size)."""
        self.values: dict[int, Tensor] = {}
        self._whole: list[Tensor] = []
        """Keys and values, each of all layers of the same sizes that a block has: (layers, kv heads, num_blocks + 1,
        block_size, D)."""
        for (num_kv_heads, head_dim), layers in spec.layers_by_kv_sizes(part).items():
            places = list(range(len(layers)))
            if groups is not None and groups.num_windowed:
                places = [groups.places[layer] for layer in layers]
            shape = (1 + max(places), num_kv_heads, num_blocks + 1, block_size, head_dim)
            for pages in (self.keys,) if spec.latent is not None else (self.keys, self.values):
                whole = torch.empty(shape, dtype=dtype, device=device)
                self._whole.append(whole)
                pages.update((layer, whole[place]) for layer, place in zip(layers, places, strict=True))
        self._has_values = spec.latent is None
        if not self._has_values:
            self.values = self.keys
        # Gathers reuse one buffer: fresh memory costs more to map than to fill.
        self._gathered_keys = torch.empty(0, dtype=dtype, device=device)
        self._gathered_values = torch.empty(0, dtype=dtype, device=device)
        self.reset_blocks([num_blocks])

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._whole)

    @property
    def by_block(self) -> list[Tensor]:
        """Views of a block's content: for each size of heads keys and values, each (num_blocks, layers, kv heads,
        block_size, head size)."""
        return [pages.movedim(2, 0)[: self.num_blocks] for pages in self._whole]

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Zeroes blocks: one owner's infinities would reach the next through masked slots, whose weight is 0."""
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for pages in self._whole:
            pages.index_fill_(2, ids, 0)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values, each (T, kv heads, head size), in ``slots`` (T,); of latents only the keys."""
        write_kv(self.keys[layer], slots, keys)
        if self._has_values:
            write_kv(self.values[layer], slots, values)

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of rows, each (kv heads, B, N * block_size, head size), from a ``table`` (B, N) of block ids,
        valid until the next call. Slots past a row's end are included unchanged and must be masked."""
        size = table.numel() * self.keys[layer][:, 0].numel()
        if self._gathered_keys.numel() < size:
            self._gathered_keys = self._gathered_keys.new_empty(size)
            self._gathered_values = self._gathered_values.new_empty(size if self._has_values else 0)
        keys = gather_kv(self.keys[layer], table, self._gathered_keys[:size])
        if not self._has_values:
            return keys, keys
        return keys, gather_kv(self.values[layer], table, self._gathered_values[:size])
