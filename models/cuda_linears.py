"""Linears that the CUDA backend multiplies by its own kernels: of eight or four bits, made at load or as the checkpoint
has them, and, where a token's bits must not depend on the batch, of floats. Otherwise those are torch's."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cuda.quantize import quantize_int4, quantize_int8
from penstock.kernels.cuda.quantized_product import ProductRoom, product
from penstock.kernels.cuda.quantized_tiles import changes
from penstock.kernels.cuda.quantized_weight import QuantizedWeight, keep_floats, pack_bytes, pack_int4
from penstock.models.checkpoint import CheckpointInfo
from penstock.models.quantized_matrix import QuantizedMatrix, read_matrix
from penstock.models.weights import DenseLinear, Linear

AT_LOAD: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int8": quantize_int8, "int4": quantize_int4}


class CudaLinears:
    """Makes a model's linears, and gives them the room that they share."""

    def __init__(self, info: CheckpointInfo, quantization: str, device: torch.device, *, deterministic: bool) -> None:
        self._info = info
        self._quantize = AT_LOAD.get(quantization)
        self._device = device
        self._deterministic = deterministic
        self._made: list[QuantizedWeight] = []
        self._dtype = torch.float32
        self._room: ProductRoom | None = None

    def make(
        self,
        names: tuple[str, ...],
        weight: Callable[[], Tensor],
        bias: Tensor | None,
        *,
        is_whole: bool,
        may_quantize: bool,
    ) -> Linear:
        """A ``loader.MakeLinear``."""
        made = self._checkpoints_own(names) if is_whole and may_quantize else None
        if made is None and may_quantize and self._quantize is not None:
            made = self._quantize(weight())
        if made is None and self._deterministic:
            made = keep_floats(weight())
        if made is None:
            return DenseLinear(weight(), bias)
        self._made.append(made)
        return CudaLinear(made, None if bias is None else bias.float(), self)

    def _checkpoints_own(self, names: tuple[str, ...]) -> QuantizedWeight | None:
        """None if there is no such; and if they were quantised so differently that they cannot be one."""
        linears = [self._info.quantized.get(name) for name in names]
        known = [linear for linear in linears if linear is not None]
        if len(known) < len(names):
            return None
        matrices = [read_matrix(linear) for linear in known]
        first = matrices[0]
        if not all(_is_alike(matrix, first) for matrix in matrices):
            return None
        codes, scales, zeros = (
            torch.from_numpy(np.concatenate(parts)).to(self._device)
            for parts in zip(*((matrix.codes, matrix.scales, matrix.zeros) for matrix in matrices), strict=True)
        )
        if first.bits == 8:
            return pack_bytes(codes.view(torch.int8), scales, narrows_inputs=True)
        order = None if first.order is None else torch.from_numpy(first.order).to(self._device)
        return pack_int4(codes, scales, zeros, group=first.group, order=order)

    def take_room(self, dtype: torch.dtype, max_tokens: int) -> None:
        """For steps of at most so many tokens; when all are made."""
        layouts = [weight.layout for weight in self._made]
        self._dtype = dtype
        self._room = ProductRoom.allocate(layouts, dtype, max_tokens, self._device, deterministic=self._deterministic)

    def changes(self) -> list[int]:
        """Numbers of tokens from which on other kernels run."""
        return [
            number
            for layout in {weight.layout for weight in self._made}
            for number in changes(layout, self._dtype, deterministic=self._deterministic)
        ]

    @property
    def room(self) -> ProductRoom:
        """Of all products, one after another."""
        assert self._room is not None
        return self._room


@dataclass(frozen=True, eq=False)
class CudaLinear:
    """y = x W^T + b."""

    weight: QuantizedWeight
    bias: Tensor | None
    """(N,) fp32."""
    owner: CudaLinears

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) -> (T, N)."""
        out = x.new_empty(len(x), self.weight.layout.rows)
        product(x, self.weight, out, self.owner.room, self.bias)
        return out


def _is_alike(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    if (one.bits, one.group) != (other.bits, other.group) or (one.order is None) != (other.order is None):
        return False
    return one.order is None or other.order is None or np.array_equal(one.order, other.order)
