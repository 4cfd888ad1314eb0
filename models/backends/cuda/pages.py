"""The KV cache on a GPU: pages of keys and values of every layer, in the layout that the kernels read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import PAGE_SLOTS
from penstock.models.architecture.spec import ModelSpec


@dataclass(frozen=True)
class DevicePages:
    """Pages of 16 tokens. Layers whose heads have the same sizes have one tensor."""

    whole: tuple[Tensor, ...]
    """(layers, blocks, 2, KV heads, 16, head size) each: keys, then values."""
    of_layers: tuple[Tensor, ...]
    """(blocks, 2, KV heads, 16, head size): the pages that each layer attends to, its own or an earlier layer's."""

    @classmethod
    def allocate(
        cls, spec: ModelSpec, num_blocks: int, dtype: torch.dtype, device: torch.device, part: range | None = None
    ) -> "DevicePages":
        """Allocates the pages; ``part``: only of these layers. Raises RuntimeError if memory runs out."""
        whole: list[Tensor] = []
        found: dict[int, Tensor] = {}
        for (num_kv_heads, head_dim), layers in spec.layers_by_kv_sizes(part).items():
            shape = (len(layers), num_blocks, 2, num_kv_heads, PAGE_SLOTS, head_dim)
            whole.append(torch.empty(shape, dtype=dtype, device=device))
            found.update(zip(layers, whole[-1], strict=True))
        return cls(tuple(whole), tuple(found[spec.kv_sources[layer]] for layer in part or range(spec.num_layers)))

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.whole)

    @property
    def by_block(self) -> list[Tensor]:
        """Views of the blocks' content, (blocks, layers, ...) each."""
        return [pages.movedim(1, 0) for pages in self.whole]
