"""The recurrent layers of a model on the CUDA kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape, convolve
from penstock.kernels.cuda.recurrent.rows import RecurrentRows
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape
from penstock.models.architecture.recurrent import RecurrentMixer, ShortConvolution
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.torch_common.recurrent import ConvolutionLayer
from penstock.models.backends.torch_common.weights import LayerState, LayerWeights

SEVERAL = 2
"""Stands for any number of tokens that a row may have, if that is not always 1."""


class RecurrentStep(NamedTuple):
    """The rows of a step, as its recurrent layers need them."""

    rows: RecurrentRows
    sampled: Tensor | None
    """(S,) int32: the tokens whose inputs to the layers are kept until the step has sampled; None: all tokens are
    certain."""
    kept: list[Tensor]
    """These inputs, layer by layer, which the layers add."""


def recurrent_shape(mixer: RecurrentMixer, hidden_size: int, dtype: torch.dtype, stride: int) -> RecurrentShape:
    """Returns what the kernels of a mixer are compiled for. ``stride`` is the numbers of a state's slot."""
    columns, channels = sum(mixer.inputs.values()), mixer.channels
    first, factor, after = 0, None, None
    match mixer:
        case ShortConvolution():
            first, factor, after = 2 * channels, 0, channels
        case _:
            raise NotImplementedError
    return RecurrentShape(
        convolution=ConvolutionShape(
            dtype, columns, channels, mixer.taps, first, factor, after, mixer.convolution_biased, stride
        ),
        products=((columns, hidden_size, mixer.biased), (hidden_size, mixer.output_columns, mixer.biased)),
    )


@dataclass(frozen=True)
class CudaConvolution:
    """A ``ShortConvolution``, between its two linears."""

    weights: ConvolutionLayer
    shape: ConvolutionShape
    state: LayerState

    def advance(self, x: Tensor, rows: RecurrentRows, longest: int) -> Tensor:
        """(T, rows of the linear ``inputs``) -> (T, columns of the linear ``output``)."""
        # Zeros, since nothing is written for tokens without a sequence, which pad a graph.
        y = x.new_zeros(len(x), self.shape.channels)
        convolve(self.shape, x, self.weights.weight, self.weights.bias, self.state.inputs, rows, y, longest)
        return y

    def commit(self, x: Tensor, rows: RecurrentRows) -> None:
        """Advances the states only."""
        convolve(self.shape, x, self.weights.weight, self.weights.bias, self.state.inputs, rows, None, SEVERAL)


class RecurrentLayers:
    """The recurrent layers of one model, by their number."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        states: Mapping[int, LayerState],
        dtype: torch.dtype,
        stride: int,
    ) -> None:
        """``states`` are the layers' parts of slots that are ``stride`` numbers apart."""
        self._layers: dict[int, CudaConvolution] = {}
        for index, (mixer, layer) in enumerate(zip(spec.recurrent, layers, strict=True)):
            if mixer is not None:
                shape = recurrent_shape(mixer, spec.hidden_size, dtype, stride)
                assert isinstance(layer.recurrent, ConvolutionLayer)
                self._layers[index] = CudaConvolution(layer.recurrent, shape.convolution, states[index])

    def mix(self, index: int, x: Tensor, states: RecurrentStep, longest: int) -> Tensor:
        """Computes a layer's mixer, (T, hidden) -> (T, hidden), and advances the states by the tokens that are
        certain."""
        layer = self._layers[index]
        read: Tensor = layer.weights.inputs(x)
        if states.sampled is not None:
            states.kept.append(read.index_select(0, states.sampled))
        return layer.weights.output(layer.advance(read, states.rows, longest))

    def commit(self, kept: Sequence[Tensor], rows: RecurrentRows) -> None:
        """Advances the states of all layers by tokens that were not certain. ``kept`` is what ``mix`` kept."""
        for layer, read in zip(self._layers.values(), kept, strict=True):
            layer.commit(read, rows)
