"""LoRA adapters for the backends in torch: the slots' matrices, and linears that add them to the tokens that have an
adapter. A model's code calls the same linears with adapters as without."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.memory import check_adapters_fit
from penstock.models.backends.torch_common.weights import LayerWeights, Linear, Mlp, MlpBesideExperts, Weights
from penstock.models.batch.batch import Batch
from penstock.models.checkpoint.lora.adapter import MODULES, AdaptedLinear, LoraAdapter, adapted_linears
from penstock.scheduler.worker_config import WorkerConfig

AdaptersT = TypeVar("AdaptersT", bound="TorchAdapters")
MakeLinear = Callable[[Linear, Iterable[str]], Linear]
"""Adds the adapters of the modules that a linear computes side by side."""


@dataclass(frozen=True)
class SlotMatrices:
    """The matrices of linears side by side, in all slots; those of slot s are at s - 1. Zeros fill them up to the
    largest rank, R."""

    a: Tensor
    """(slots, parts * R, columns): the matrices A of the parts, one after another."""
    b: Tensor
    """(slots, rows, R): each part's rows."""
    ends: tuple[int, ...]
    """For each part, the row of ``b`` after its last one."""
    start: int = 0
    """The column of the linears' output at which that of the first part begins."""

    def part(self, index: int) -> tuple[Tensor, Tensor, slice]:
        """Returns A and B of one part, in all slots, and its columns of the output, from ``start`` on."""
        rank = self.b.shape[2]
        columns = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return self.a[:, index * rank : (index + 1) * rank], self.b[:, columns], columns


class TorchAdapters:
    """The slots of a loaded model, and the tokens of the batch that it computes."""

    def __init__(
        self, spec: ModelSpec, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self._sizes = max_loras, max_rank
        self._dtype = dtype
        self.shapes = adapted_linears(spec)
        """The linears that adapters may change, with their rows and columns."""
        self._places: dict[AdaptedLinear, tuple[SlotMatrices, int]] = {}
        """The matrices that each linear has a part of, and the number of the part."""
        self._ranks = [0] * (max_loras + 1)
        self._groups: list[tuple[int, Tensor]] = []

    def allocate(self, linears: list[AdaptedLinear], start: int = 0) -> SlotMatrices:
        """Allocates the slots of linears that one product computes side by side, from its column ``start`` on."""
        (num_slots, rank), columns = self._sizes, self.shapes[linears[0]][1]
        ends = tuple(accumulate(self.shapes[linear][0] for linear in linears))
        matrices = SlotMatrices(
            torch.zeros(num_slots, len(linears) * rank, columns, dtype=self._dtype, device=self.device),
            torch.zeros(num_slots, ends[-1], rank, dtype=self._dtype, device=self.device),
            ends,
            start,
        )
        self._places |= {linear: (matrices, index) for index, linear in enumerate(linears)}
        return matrices

    @torch.inference_mode()
    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes an adapter into a slot that no batch uses. Raises ModelError."""
        for matrices, _ in self._places.values():
            matrices.a[slot - 1].zero_()
            matrices.b[slot - 1].zero_()
        for linear, (a, b) in adapter.matrices():
            matrices, index = self._places[linear]
            of_a, of_b, _ = matrices.part(index)
            of_a[slot - 1, : len(a)] = torch.from_numpy(a).to(self.device, self._dtype)
            of_b[slot - 1, :, : len(a)] = torch.from_numpy(b).to(self.device, self._dtype)
        self._ranks[slot] = adapter.rank

    def select(self, batch: Batch) -> None:
        """Makes this the current batch."""
        slots = batch.adapters
        self._groups = []
        if slots is not None:
            for slot in np.unique(slots[slots > 0]).tolist():
                self._groups.append((slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(self.device)))

    @property
    def is_active(self) -> bool:
        """Whether any token of the current batch has an adapter."""
        return bool(self._groups)

    def add(self, matrices: SlotMatrices, x: Tensor, y: Tensor) -> None:
        """y[t] += B A x[t] for the tokens with an adapter; ``x`` is (T, columns), ``y`` (T, rows)."""
        y = y[:, matrices.start :]
        for slot, tokens in self._groups:
            chosen, rank = x[tokens], self._ranks[slot]
            for index in range(len(matrices.ends)):
                a, b, columns = matrices.part(index)
                inner = functional.linear(chosen, a[slot - 1, :rank])
                y[tokens, columns] += functional.linear(inner, b[slot - 1, :, :rank])


@dataclass(frozen=True)
class LoraLinear:
    """A linear, or several side by side, with their adapters."""

    base: Linear
    adapters: TorchAdapters
    matrices: SlotMatrices

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out)."""
        y: Tensor = self.base(x)
        if self.adapters.is_active:
            self.adapters.add(self.matrices, x, y)
        return y


def add_slots(
    kind: type[AdaptersT],
    config: WorkerConfig,
    spec: ModelSpec,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Weights, AdaptersT | None]:
    """Allocates the slots that the config specifies, of a backend's kind. Returns the weights with linears that add
    adapters, and the slots. Raises ModelError."""
    if not config.max_loras:
        return weights, None
    max_loras, max_rank = config.max_loras, config.max_lora_rank
    num_elements = max_loras * max_rank * sum(map(sum, adapted_linears(spec).values()))
    check_adapters_fit(config, num_elements * dtype.itemsize)
    adapters = kind(spec, max_loras, max_rank, dtype, device)
    layers = tuple(_adapted(layer, index, spec, adapters) for index, layer in enumerate(weights.layers))
    return replace(weights, layers=layers), adapters


def _adapted(layer: LayerWeights, index: int, spec: ModelSpec, adapters: TorchAdapters) -> LayerWeights:
    def linear(base: Linear, modules: Iterable[str], start: int = 0) -> Linear:
        found = [linear for module in modules if (linear := AdaptedLinear(index, module)) in adapters.shapes]
        return LoraLinear(base, adapters, adapters.allocate(found, start)) if found else base

    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        mlp = _adapted_mlp(mlp, spec, linear)
    elif isinstance(mlp, MlpBesideExperts):
        mlp = replace(mlp, mlp=_adapted_mlp(mlp.mlp, spec, linear))
    # The gate's rows, if there are any, are the last ones; its name is that of a linear of the MLP.
    rows = {module: number for module, number in spec.qkv_rows(index).items() if module in MODULES[:3]}
    start = 0 if AdaptedLinear(index, "q_proj") in adapters.shapes else rows.get("q_proj", 0)
    qkv, output = linear(layer.qkv, rows, start), linear(layer.output, ["o_proj"])
    return replace(layer, qkv=qkv, output=output, mlp=mlp)


def _adapted_mlp(mlp: Mlp, spec: ModelSpec, linear: MakeLinear) -> Mlp:
    gate_up = ["gate_proj", "up_proj"] if spec.gated_mlp else ["up_proj"]
    return replace(mlp, gate_up=linear(mlp.gate_up, gate_up), down=linear(mlp.down, ["down_proj"]))
