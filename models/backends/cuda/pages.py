"""The KV cache on a GPU: pages of keys and values of every layer, in the layout that the kernels read, and the scales
that some quantised checkpoints have for pages in fp8."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import PAGE_SLOTS
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.kv_groups import KvGroups
from penstock.models.backends.tensor_parallel import TensorParallel, share
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.reader import read_floats
from penstock.models.errors import ModelError


@dataclass(frozen=True)
class DevicePages:
    """Pages of 16 tokens. Layers whose heads have the same sizes have one tensor."""

    whole: tuple[Tensor, ...]
    """(layers of a block, blocks, 2, KV heads, 16, head size) each: keys, then values; of latents, (layers, blocks, 1,
    1, 16, size)."""
    of_layers: tuple[Tensor | None, ...]
    """(blocks, 2, KV heads, 16, head size), or (blocks, 1, 1, 16, size): the pages that each layer attends to, its own
    or an earlier layer's; None without attention."""

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        part: range | None = None,
        groups: KvGroups | None = None,
    ) -> "DevicePages":
        """Allocates the pages; ``part``: only of these layers. ``groups`` are those of the layers, by default one.
        Raises RuntimeError if memory runs out."""
        whole: list[Tensor] = []
        found: dict[int, Tensor] = {}
        for (num_kv_heads, head_dim), layers in spec.layers_by_kv_sizes(part).items():
            sections = 2 if spec.latent is None else 1
            places = list(range(len(layers)))
            if groups is not None and groups.num_windowed:
                places = [groups.places[layer] for layer in layers]
            shape = (1 + max(places), num_blocks, sections, num_kv_heads, PAGE_SLOTS, head_dim)
            whole.append(torch.empty(shape, dtype=dtype, device=device))
            found.update((layer, whole[-1][place]) for layer, place in zip(layers, places, strict=True))
        return cls(tuple(whole), tuple(found.get(spec.kv_sources[layer]) for layer in part or range(spec.num_layers)))

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.whole)

    @property
    def by_block(self) -> list[Tensor]:
        """Views of the blocks' content, (blocks, layers, ...) each."""
        return [pages.movedim(1, 0) for pages in self.whole]


def read_kv_scales(info: CheckpointInfo, parallel: TensorParallel, device: torch.device) -> list[Tensor]:
    """Returns the scales of the rank's heads in what each layer attends to, (2, K) in fp32: those of keys, then those
    of values. They are 1 where the checkpoint has none. Raises ModelError if one is not above zero."""
    scales: list[Tensor] = []
    for layer, source in enumerate(info.spec.kv_sources):
        if source != layer:
            scales.append(scales[source])
            continue
        num_heads = info.spec.at(layer).num_kv_heads
        of_layer = np.ones((2, num_heads), dtype=np.float32)
        for of_kind, kind in zip(of_layer, "kv", strict=True):
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            entry = info.kv_scales.get(name)
            if entry is None:
                continue
            of_kind[:] = read_floats(entry).reshape(-1)
            if not (np.isfinite(of_kind).all() and (of_kind > 0).all()):
                raise ModelError(
                    f"{entry.file}: the scale {name} is not above zero: download the model's weights again, or give "
                    "--kv-cache-dtype auto"
                )
        scales.append(torch.from_numpy(of_layer)[:, share(num_heads, parallel)].contiguous().to(device))
    return scales
