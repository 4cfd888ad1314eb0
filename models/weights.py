"""A model's weights as a backend in torch holds them: fused where one product can do the work of several."""

from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """A linear map. Quantised kinds take the place of ``DenseLinear`` without the model's knowledge."""

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        ...


@dataclass(frozen=True)
class DenseLinear:
    """y = x W^T + b; ``weight`` is (out, in), ``bias`` (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Of weight and bias."""
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    attention_norm: Tensor
    qkv: Linear
    """Rows: all query heads, all key heads, all value heads."""
    qk_norm: Tensor | None
    """(query heads + key heads, head size): the norm's weight for each of them."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    """Rows: gate, then up."""
    down: Linear

    @property
    def num_bytes(self) -> int:
        """Of everything in the layer."""
        parts = [getattr(self, field.name) for field in fields(self)]
        return sum(part.nbytes if isinstance(part, Tensor) else part.num_bytes for part in parts if part is not None)


@dataclass(frozen=True)
class Weights:
    """The whole model."""

    embedding: Tensor
    """(vocabulary, hidden)."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Linear
    """Only the rows that the tokenizer can use; shares the embedding's memory where they are tied."""
    num_bytes: int
