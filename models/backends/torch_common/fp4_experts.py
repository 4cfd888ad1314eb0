"""Experts that stay in MXFP4 on the device, as gpt-oss's are published."""

import torch
from torch import Tensor

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.tensor_parallel import TensorParallel, share
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.layout import QuantizedLinear
from penstock.models.checkpoint.quantization.reader import read_fp4
from penstock.models.checkpoint.quantization.scheme import MX_GROUP, QuantLayout

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)


def has_fp4_experts(info: CheckpointInfo, num_ranks: int) -> bool:
    """Whether all experts are in MXFP4, in whole groups of columns on every rank."""
    spec = info.spec.divided(num_ranks)
    if spec.experts is None or spec.hidden_size % MX_GROUP or spec.experts.intermediate_size % MX_GROUP:
        return False
    names = [name.removesuffix(".weight") for name, shape in spec.tensors() if ".experts." in name and shape[1:]]
    linears = [info.quantized.get(name) for name in names]
    return all(linear is not None and linear.scheme.layout is QuantLayout.MXFP4 for linear in linears)


def stored_fp4_bytes(rows: int, columns: int) -> int:
    """Returns the size of a matrix."""
    return rows * (columns // 2 + columns // MX_GROUP)


class Fp4Experts:
    """Reads a rank's parts of the experts of ``has_fp4_experts``: codes (E, rows, columns / 2) and exponents (E, rows,
    columns / 32), both uint8."""

    def __init__(self, info: CheckpointInfo, spec: ModelSpec, device: torch.device, parallel: TensorParallel) -> None:
        """``spec`` is the rank's."""
        assert spec.experts is not None
        self._quantized = info.quantized
        self._num, self._inner, self._hidden = (
            spec.experts.num_experts, spec.experts.intermediate_size, spec.hidden_size,
        )  # fmt: skip
        self._device = device
        self._mine = share(self._inner * parallel.size, parallel)

    def gate_up(self, prefix: str) -> tuple[Tensor, Tensor]:
        """Returns each expert's rows of the gate, then of up. ``prefix`` is the layer's, such as
        ``model.layers.0.mlp.``."""
        codes, exponents = self._empty(2 * self._inner, self._hidden)
        for expert in range(self._num):
            for half, name in enumerate(GATE_UP):
                read = read_fp4(self._linear(prefix, expert, name))
                rows = slice(half * self._inner, (half + 1) * self._inner)
                for out, part in zip((codes, exponents), read, strict=True):
                    out[expert, rows].copy_(torch.from_numpy(part[self._mine]))
        return codes, exponents

    def down(self, prefix: str) -> tuple[Tensor, Tensor]:
        """Returns the columns of the rank."""
        codes, exponents = self._empty(self._hidden, self._inner)
        for expert in range(self._num):
            read = read_fp4(self._linear(prefix, expert, *DOWN))
            for out, part, per_byte in zip((codes, exponents), read, (2, MX_GROUP), strict=True):
                columns = slice(self._mine.start // per_byte, self._mine.stop // per_byte)
                out[expert].copy_(torch.from_numpy(part[:, columns]))
        return codes, exponents

    def _linear(self, prefix: str, expert: int, name: str) -> QuantizedLinear:
        return self._quantized[f"{prefix}experts.{expert}.{name}"]

    def _empty(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shapes = [(self._num, rows, columns // per_byte) for per_byte in (2, MX_GROUP)]
        codes, exponents = (torch.empty(shape, dtype=torch.uint8, device=self._device) for shape in shapes)
        return codes, exponents
