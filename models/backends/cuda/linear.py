"""Linears that the CUDA backend computes with its own kernels: 8-bit or 4-bit weights, quantised at load or by the
checkpoint, and float weights if a step has few tokens or if a token's bits must not depend on the batch. All others use
torch."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cuda.activation import gated_activation
from penstock.kernels.cuda.core.capture import seconds_on_gpu
from penstock.kernels.cuda.core.launch import is_aligned
from penstock.kernels.cuda.gemv import gemv, has_aligned_rows
from penstock.kernels.cuda.quantized.gemm import GemmWorkspace, gemm
from penstock.kernels.cuda.quantized.quantize import CHUNK, GROUP, quantize_fp8, quantize_int4, quantize_int8
from penstock.kernels.cuda.quantized.scaled_mm import has_scaled_mm, measure_min_tokens, scaled_mm
from penstock.kernels.cuda.quantized.tiles import BUCKETS as TILE_BUCKETS, changes
from penstock.kernels.cuda.quantized.weights import (
    Codes,
    QuantizedWeight,
    WeightLayout,
    keep_floats,
    multiplied_out,
    pack_bytes,
    pack_int4,
)
from penstock.kernels.cuda.skinny_gemm import BUCKETS, MAX_TOKENS, SkinnyWorkspace, skinny_gemm
from penstock.models.backends.cuda.product_choice import (
    TOKEN_BUCKETS,
    ProductCandidates,
    ProductChoice,
    ProductForm,
    SecondsOf,
)
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.backends.torch_common.weights import DenseLinear, Linear
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.reader import QuantizationError, read_matrix
from penstock.models.checkpoint.quantization.scheme import QuantScheme

AT_LOAD: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4": quantize_int4,
    "fp8": quantize_fp8,
}
CHANGES = {2, *(number + 1 for number in BUCKETS), *(int(bucket.max_tokens) + 1 for bucket in TILE_BUCKETS[:-1])}
"""All numbers of tokens from which other kernels may compute a product, whatever its weight."""
MAX_MEASURED = 16
"""The maximum number of weights of one shape that a measurement multiplies by."""
NEVER = 1 << 62
"""Stands for an infinite number of tokens."""


class CudaLinears:
    """Creates a model's linears, and the room that they share."""

    def __init__(self, info: CheckpointInfo, at_load: str | None, device: torch.device, *, deterministic: bool) -> None:
        """``at_load`` is the quantisation of float weights, one of AT_LOAD; None leaves them as they are."""
        self.error = QuantizationError()
        self._info = info
        self._quantize = None if at_load is None else AT_LOAD[at_load]
        self._device = device
        self._deterministic = deterministic
        self._made: list[QuantizedWeight] = []
        self._skinny: list[SkinnyLinear] = []
        self.choice = ProductChoice()
        self._dtype = torch.float32
        self._room: GemmWorkspace | None = None
        self._min_scaled_tokens: dict[WeightLayout, float] = {}
        """The number of tokens from which torch multiplies by weights of a layout; none before ``measure``."""
        self._skinny_room: SkinnyWorkspace | None = None

    def make(
        self, stored: tuple[str, ...], weight: Callable[[], Tensor], bias: Tensor | None, *, may_quantize: bool
    ) -> Linear:
        """Implements ``loader.MakeLinear``."""
        made = self._checkpoints_own(stored) if stored else None
        if made is None and may_quantize and self._quantize is not None:
            whole = weight()
            made = self._quantize(whole)
            self._add_error(whole, made)
        if made is None and self._deterministic:
            made = keep_floats(weight())
        if made is None:
            whole = weight()
            if not has_aligned_rows(whole):
                return DenseLinear(whole, bias)
            self._skinny.append(SkinnyLinear(whole, bias, owner=self))
            return self._skinny[-1]
        self._made.append(made)
        return CudaLinear(made, None if bias is None else bias.float(), self)

    def _checkpoints_own(self, names: tuple[str, ...]) -> QuantizedWeight | None:
        """Returns the checkpoint's quantised weights; None if there are none, or if they cannot become one."""
        linears = [self._info.quantized.get(name) for name in names]
        known = [linear for linear in linears if linear is not None]
        if len(known) < len(names) or len({linear.scheme.narrows_inputs for linear in known}) > 1:
            return None
        scheme = known[0].scheme
        if not has_products(scheme):
            return None
        matrices = [read_matrix(linear) for linear in known]
        first = matrices[0]
        if not all(map(first.is_alike, matrices)):
            return None
        codes, scales, zeros = (
            torch.from_numpy(np.concatenate(parts)).to(self._device)
            for parts in zip(*((matrix.codes, matrix.scales, matrix.zeros) for matrix in matrices), strict=True)
        )
        if scheme.bits == 8:
            kind = torch.float8_e4m3fn if scheme.is_float else torch.int8
            return pack_bytes(codes.view(kind), scales, group=scheme.group, narrows_inputs=scheme.narrows_inputs)
        order = None if first.order is None else torch.from_numpy(first.order).to(self._device)
        return pack_int4(codes, scales, zeros, group=scheme.group, order=order)

    def _add_error(self, whole: Tensor, quantized: QuantizedWeight) -> None:
        for begin in range(0, len(whole), CHUNK):
            part = whole[begin : begin + CHUNK].float()
            off = multiplied_out(quantized, begin, begin + len(part)) - part
            self.error.squared_error += off.square_().sum(dtype=torch.float64).item()
            self.error.squared_weights += part.square().sum(dtype=torch.float64).item()

    def take_room(self, dtype: torch.dtype, max_tokens: int) -> None:
        """Allocates room for steps of at most ``max_tokens``, after all linears are made."""
        layouts = [weight.layout for weight in self._made]
        self._dtype = dtype
        self._room = GemmWorkspace.allocate(layouts, dtype, max_tokens, self._device, deterministic=self._deterministic)
        self._skinny_room = SkinnyWorkspace.allocate({linear.shape for linear in self._skinny}, self._device)

    def measure(
        self,
        max_tokens: int,
        seconds_of: SecondsOf = seconds_on_gpu,
        parallel: TensorParallel = ALONE,
        activations: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        """Chooses between torch and the kernels: for products in fp8 with many tokens, and for products of few tokens
        with float weights. Takes about a second at most, besides what is compiled. ``activations`` are those that
        follow the products of gate and up, by the weights' shapes. All ranks of a model call this together."""
        if self._deterministic:
            return
        for weight in self._made:
            layout = weight.layout
            if layout not in self._min_scaled_tokens and has_scaled_mm(layout, self._dtype):
                least = measure_min_tokens(weight, self.room, max_tokens, seconds_of)
                # The same on all ranks.
                agreed = -parallel.least(-int(min(least, NEVER)))
                self._min_scaled_tokens[layout] = math.inf if agreed == NEVER else agreed
        self.choice.measure(self._candidates(max_tokens, activations or {}), seconds_of, parallel.least)

    def _candidates(self, max_tokens: int, activations: Mapping[tuple[int, int], str]) -> Iterator[ProductCandidates]:
        """Yields the products of few tokens with weights of each shape."""
        by_shape: dict[tuple[int, int], list[SkinnyLinear]] = {}
        for linear in self._skinny:
            by_shape.setdefault(linear.shape, []).append(linear)
        # With more than one token, torch computes the products of fp32.
        buckets = TOKEN_BUCKETS if self._dtype.itemsize == 2 else TOKEN_BUCKETS[:1]
        for shape, linears in by_shape.items():
            some, activation = linears[:MAX_MEASURED], activations.get(shape)
            for below, bucket in zip((0, *buckets), buckets, strict=False):
                if max_tokens <= below:
                    continue
                x = torch.randn(min(bucket, max_tokens), shape[1], dtype=self._dtype, device=self._device)
                by_kernels, by_torch = (
                    partial(_call_all, [partial(way, linear, x, activation) for linear in some])
                    for way in (SkinnyLinear.by_kernels, SkinnyLinear.by_torch)
                )
                yield ProductCandidates(ProductForm(*shape, bucket), by_kernels, by_torch, len(some))

    def uses_scaled_mm(self, weight: QuantizedWeight, num_tokens: int) -> bool:
        """Whether torch multiplies that many tokens by a weight."""
        return num_tokens >= self._min_scaled_tokens.get(weight.layout, math.inf)

    def changes(self) -> list[int]:
        """Returns the numbers of tokens from which other kernels compute some product."""
        of_quantized = {
            number
            for layout in {weight.layout for weight in self._made}
            for number in changes(layout, self._dtype, deterministic=self._deterministic)
        }
        # With more than one token, torch computes the products of fp32.
        buckets = BUCKETS if self._dtype.itemsize == 2 else ()
        of_floats = {2, *(bucket + 1 for bucket in buckets)} if self._skinny else set()
        return sorted(of_quantized | of_floats)

    @property
    def room(self) -> GemmWorkspace:
        """The room that all products use in turn."""
        assert self._room is not None
        return self._room

    @property
    def skinny_room(self) -> SkinnyWorkspace:
        """The room that the products of few tokens use in turn."""
        assert self._skinny_room is not None
        return self._skinny_room


@dataclass(frozen=True, eq=False)
class SkinnyLinear(DenseLinear):
    """A linear with a float weight, whose products with few tokens have kernels of their own."""

    owner: CudaLinears = field(kw_only=True)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        return self.by_kernels(x) if self.computes(x) else self.by_torch(x)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, columns = self.weight.shape
        return rows, columns

    def computes(self, x: Tensor) -> bool:
        """Whether the kernels compute the product with ``x``, with an activation or without."""
        can = len(x) <= (MAX_TOKENS if x.dtype.itemsize == 2 else 1) and is_aligned(x)
        return can and not self.owner.choice.is_torchs(*self.shape, len(x))

    def by_torch(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Computes the same as ``by_kernels``, for any ``x``."""
        y = super().__call__(x)
        if activation is None:
            return y
        out = y.new_empty(len(y), y.shape[1] // 2)
        gated_activation(y, activation, out)
        return out

    def by_kernels(self, x: Tensor, activation: str | None = None) -> Tensor:
        """(T, K) -> (T, N), or with an activation (T, N / 2): activation(gate) * up, for the rows of gate and up.
        ``computes(x)`` must hold."""
        out = x.new_empty(len(x), len(self.weight) // (1 if activation is None else 2))
        if len(x) == 1:
            gemv(x, self.weight, out, self.bias, activation)
        else:
            skinny_gemm(x, self.weight, out, self.owner.skinny_room, self.bias, activation)
        return out


def _call_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


@dataclass(frozen=True, eq=False)
class CudaLinear:
    """y = x W^T + b."""

    weight: QuantizedWeight
    bias: Tensor | None
    """(N,) fp32."""
    owner: CudaLinears

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        if self.owner.uses_scaled_mm(self.weight, len(x)):
            made = scaled_mm(x, self.weight, self.owner.room)
            return made if self.bias is None else made.add_(self.bias)
        out = x.new_empty(len(x), self.weight.layout.rows)
        gemm(x, self.weight, out, self.owner.room, self.bias)
        return out


def has_products(scheme: QuantScheme) -> bool:
    """Whether a kernel supports this quantisation; otherwise weights are dequantised."""
    return scheme.narrows_inputs or not (scheme.is_wide or (scheme.is_float and scheme.group))


def stored_bytes(rows: int, columns: int, at_load: str | None, scheme: QuantScheme | None) -> int | None:
    """Returns the size of a matrix that is quantised at load or in the checkpoint; None if it stays float."""
    bits, group = 8, 0
    if at_load is None:
        if scheme is None or not has_products(scheme):
            return None
        bits, group = scheme.bits, scheme.group
    elif at_load == "int4":
        bits, group = 4, GROUP
    codes = Codes.INT4 if bits == 4 else Codes.FP8  # int8 takes the same
    return WeightLayout(codes, rows, columns, group, narrows_inputs=bits == 8).num_bytes
