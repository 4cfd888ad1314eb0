"""The cases of recurrent layers: a prompt, scanned token by token and in chunks."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from gpu_bench.kernels.cases import Case, Make, distance
from gpu_bench.sizes import Model, Sizes
from penstock.kernels.cuda.recurrent.chunk_products import products_size
from penstock.kernels.cuda.recurrent.chunked_scan import scan_chunks
from penstock.kernels.cuda.recurrent.rows import RecurrentRows, RowChunks, chunk_lengths
from penstock.kernels.cuda.recurrent.scan import ScanShape, scan
from penstock.kernels.reference.recurrent import gated_delta_rule, state_space_scan

ALLOWED = 1e-3
"""Of fp32, whose products are those of three parts in tf32."""


class Prompt:
    """The inputs of one row of some tokens, and what they give."""

    def __init__(self, shape: ScanShape, tokens: int, device: torch.device) -> None:
        self._shape = shape

        def integers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.mixed = functional.silu(torch.randn(tokens, shape.channels, device=device))
        self.x = torch.randn(tokens, shape.columns, device=device).to(shape.dtype)
        self.decay_bias = torch.randn(shape.heads, device=device) - 2.0
        self.rates = -torch.randn(shape.heads, device=device).exp()
        self.skips = None if shape.erases else torch.randn(shape.heads, device=device)
        self.slot = torch.zeros(1, shape.stride, device=device)
        size = (shape.heads, shape.key_size, shape.value_size)
        self.matrices = torch.unflatten(self.slot[:, : size[0] * size[1] * size[2]], 1, size)
        one, saves = integers(tokens), torch.zeros(tokens, dtype=torch.int32, device=device)
        self.rows = RecurrentRows(integers(0), integers(0), one, one, saves)
        lengths = list(chunk_lengths(tokens, tokens, ()))
        starts = accumulate(lengths[:-1], initial=0)
        self.chunks = RowChunks(integers(0, len(lengths)), integers(*starts), integers(*lengths))
        self.room = torch.empty(tokens * products_size(shape), device=device)
        self.y = torch.empty(tokens, shape.heads * shape.value_size, device=device)

    def run(self, *, in_chunks: bool) -> None:
        """Scans the row, from the state that the last run left."""
        of_heads = self.decay_bias, self.rates, self.skips
        inputs = self._shape, self.mixed, self.x, *of_heads, self.matrices, self.rows
        if in_chunks:
            scan_chunks(*inputs, self.chunks, self.room, self.y)
        else:
            scan(*inputs, self.y)

    def expected(self) -> Tensor:
        """Returns the reference's result, from a state of zeros."""
        shape = self._shape
        state = torch.zeros_like(self.matrices)

        def heads(begin: int, count: int, size: int) -> Tensor:
            part = self.mixed[:, begin : begin + count * size].view(1, -1, count, size)
            return part.repeat_interleave(shape.heads // count, dim=2)

        query, key = (heads(begin, shape.key_heads, shape.key_size) for begin in (shape.query, shape.key))
        value = heads(shape.value, shape.heads, shape.value_size)
        step = functional.softplus(self._columns(shape.decay) + self.decay_bias)
        if shape.beta is None or shape.unit_eps is None:
            step = step.clamp(shape.least_step, shape.most_step)
            y = state_space_scan(value, step, torch.exp(self.rates * step), key, query, state)
            return (y if self.skips is None else y + value * self.skips.unsqueeze(-1)).flatten(2)[0]
        eps = shape.unit_eps
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + eps) for part in (query, key))
        decay, beta = torch.exp(self.rates * step), torch.sigmoid(self._columns(shape.beta))
        return gated_delta_rule(query * shape.key_size**-0.5, key, value, decay, beta, state).flatten(2)[0]

    def _columns(self, begin: int) -> Tensor:
        return self.x[None, :, begin : begin + self._shape.heads].float()


def prompt(model: Model, sizes: Sizes, device: torch.device, *, in_chunks: bool) -> Case:
    """scan, or scan_chunks, of one layer."""
    shape = next(kind.scan for kind in model.shape.recurrent if kind.scan is not None)
    tokens = sizes.kernels.prompt
    timed: Callable[[], None] = partial(Prompt(shape, tokens, device).run, in_chunks=in_chunks)

    def error() -> float:
        checked = Prompt(shape, sizes.kernels.checked, device)
        checked.run(in_chunks=in_chunks)
        return distance(checked.y, checked.expected())

    read = 4 * tokens * (shape.channels + shape.heads * shape.value_size)
    # What a token adds to its matrices, and what it reads of them.
    products = 4.0 * tokens * shape.heads * shape.key_size * shape.value_size
    kind = "gated delta rule" if shape.erases else "Mamba-2"
    name = "scan_chunks" if in_chunks else "scan"
    return Case(name, f"{kind}, prompt of {tokens} tokens", error, ALLOWED, timed, read, products)


CASES: list[Make] = [partial(prompt, in_chunks=False), partial(prompt, in_chunks=True)]
