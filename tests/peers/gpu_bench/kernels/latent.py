"""Attention of latents with the backend's tiles, and with others that might be faster."""

from dataclasses import dataclass
from functools import partial

import torch

from gpu_bench.kernels.attention import Step
from gpu_bench.kernels.cases import ULP, Case, Make
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.attention.plan import DecodeShape, DecodeTiles

TILES = (
    DecodeTiles(16, 16, 3, 2),
    DecodeTiles(16, 32, 2, 1),
    DecodeTiles(16, 32, 3, 1, num_warps=8),
    DecodeTiles(32, 16, 3, 1, num_warps=8),
    DecodeTiles(32, 32, 3, 1, num_warps=8),
    DecodeTiles(32, 64, 2, 1, num_warps=8),
    DecodeTiles(64, 32, 2, 1, num_warps=8),
)
"""Rows, positions, stages, and programs of a multiprocessor."""


@dataclass(frozen=True)
class TiledShape(DecodeShape):
    """A shape with tiles of its own."""

    own_tiles: DecodeTiles = TILES[0]

    @property
    def tiles(self) -> DecodeTiles:
        """Those."""
        return self.own_tiles


def latents(model: Model, sizes: Sizes, device: torch.device, *, tiles: DecodeTiles | None) -> Case:
    """Rows that decode; with the backend's tiles, if none are given."""
    batch, context, checked = sizes.kernels.batch, sizes.kernels.context, sizes.kernels.checked
    attention = model.shape.attention_of(None)
    shape = DecodeShape(attention, 1) if tiles is None else TiledShape(attention, 1, own_tiles=tiles)
    step = Step.make(shape, [(1, context)] * batch, device)
    small = Step.make(shape, [(1, max(1, checked * (row + 1) // batch)) for row in range(batch)], device)
    form = shape.tiles
    text = f"{batch} rows of {context}, tiles of {form.block_m} x {form.block_n}, {form.num_stages} stages, "
    text += f"{form.programs} x {form.num_warps} warps" + ", the backend's" * (tiles is None)
    dtype = model.shape.dtype
    return Case("latent attention", text, small.error, ULP[dtype], step.run, step.num_bytes, step.products)


CASES: list[Make] = [partial(latents, tiles=tiles) for tiles in (None, *TILES)]
