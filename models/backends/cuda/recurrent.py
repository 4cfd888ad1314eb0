"""The recurrent layers of a model on the CUDA kernels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.recurrent.chunk_products import is_chunked, products_size
from penstock.kernels.cuda.recurrent.chunked_scan import scan_chunks
from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape, convolve
from penstock.kernels.cuda.recurrent.gated_norm import GatedNormShape, gated_norm
from penstock.kernels.cuda.recurrent.rows import LEAST_CHUNKED, RecurrentRows, RowChunks
from penstock.kernels.cuda.recurrent.scan import ScanShape, scan
from penstock.kernels.cuda.recurrent.shapes import RecurrentShape
from penstock.models.architecture.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.torch_common.recurrent import L2_EPS, ConvolutionLayer, DeltaNetLayer, Mamba2Layer
from penstock.models.backends.torch_common.weights import LayerState, LayerWeights, RecurrentLayer

SEVERAL = 2
"""Stands for any number of tokens that a row may have, if that is not always 1."""


class RecurrentStep(NamedTuple):
    """The rows of a step, as its recurrent layers need them."""

    rows: RecurrentRows
    chunks: RowChunks
    sampled: Tensor | None
    """(S,) int32: the tokens whose inputs to the layers are kept until the step has sampled; None: all tokens are
    certain."""
    kept: list[Tensor]
    """These inputs, layer by layer, which the layers add."""


def recurrent_shape(mixer: RecurrentMixer, hidden_size: int, dtype: torch.dtype, stride: int) -> RecurrentShape:
    """Returns what the kernels of a mixer are compiled for. ``stride`` is the numbers of a state's slot."""
    columns = sum(mixer.inputs.values())
    products = (columns, hidden_size, mixer.biased), (hidden_size, mixer.output_columns, mixer.biased)

    def convolution(first: int, factor: int | None = None, after: int | None = None) -> ConvolutionShape:
        return ConvolutionShape(
            dtype, columns, mixer.channels, mixer.taps, first, factor, after, mixer.convolution_biased, stride
        )

    match mixer:
        case ShortConvolution():
            channels = mixer.channels
            return RecurrentShape(convolution=convolution(2 * channels, 0, channels), products=products)
        case GatedDeltaNet():
            beta = mixer.channels + mixer.values
            scanned = ScanShape(
                dtype=dtype, columns=columns, channels=mixer.channels, query=0, key=mixer.keys, value=2 * mixer.keys,
                beta=beta, decay=beta + mixer.num_value_heads, heads=mixer.num_value_heads,
                key_heads=mixer.num_key_heads, key_size=mixer.key_size, value_size=mixer.value_size, unit_eps=L2_EPS,
                least_step=0.0, most_step=None, stride=stride,
            )  # fmt: skip
            norm = GatedNormShape(
                dtype=dtype, columns=columns, first=mixer.channels, parts=mixer.num_value_heads,
                width=mixer.value_size, weights=1, gates_first=False, eps=mixer.eps,
            )  # fmt: skip
            return RecurrentShape(convolution=convolution(0), scan=scanned, norm=norm, products=products)
        case Mamba2():
            step = mixer.values + mixer.channels
            least, most = mixer.step_limits
            scanned = ScanShape(
                dtype=dtype, columns=columns, channels=mixer.channels, query=mixer.values + mixer.keys,
                key=mixer.values, value=0, beta=None, decay=step, heads=mixer.num_heads, key_heads=mixer.num_groups,
                key_size=mixer.state_size, value_size=mixer.head_size, unit_eps=None, least_step=least,
                most_step=None if math.isinf(most) else most, stride=stride,
            )  # fmt: skip
            norm = GatedNormShape(
                dtype=dtype, columns=columns, first=0, parts=mixer.num_groups, width=mixer.values // mixer.num_groups,
                weights=mixer.num_groups if mixer.normed else 0, gates_first=True, eps=mixer.eps,
            )  # fmt: skip
            return RecurrentShape(convolution=convolution(mixer.values), scan=scanned, norm=norm, products=products)


class CudaMixer(Protocol):
    """A recurrent mixer, between its two linears."""

    def advance(self, x: Tensor, rows: RecurrentRows, chunks: RowChunks, longest: int) -> Tensor:
        """(T, rows of the linear ``inputs``) -> (T, columns of the linear ``output``), and advances the states. No row
        has over ``longest`` tokens."""

    def commit(self, x: Tensor, rows: RecurrentRows) -> None:
        """Only advances the states."""


@dataclass(frozen=True)
class CudaConvolution:
    """A ``ShortConvolution``."""

    weights: ConvolutionLayer
    shape: ConvolutionShape
    state: LayerState

    def advance(self, x: Tensor, rows: RecurrentRows, chunks: RowChunks, longest: int) -> Tensor:
        # Zeros, since nothing is written for tokens without a sequence, which pad a graph.
        y = x.new_zeros(len(x), self.shape.channels)
        convolve(self.shape, x, self.weights.weight, self.weights.bias, self.state.inputs, rows, y, longest)
        return y

    def commit(self, x: Tensor, rows: RecurrentRows) -> None:
        convolve(self.shape, x, self.weights.weight, self.weights.bias, self.state.inputs, rows, None, SEVERAL)


@dataclass(frozen=True)
class ScanWeights:
    """The tensors of a mixer with a matrix per head, all in fp32."""

    weight: Tensor
    """(channels, taps): the convolution's."""
    bias: Tensor | None
    """(channels,)."""
    decay_bias: Tensor
    """(heads,); ``rates`` and ``skips`` likewise."""
    rates: Tensor
    skips: Tensor | None
    norm: Tensor | None
    """(1, head size), or (groups, the columns of a group)."""


@dataclass(frozen=True)
class CudaScan:
    """A convolution, a scan and a gated norm: a ``GatedDeltaNet`` or a ``Mamba2``."""

    weights: ScanWeights
    convolution: ConvolutionShape
    scan: ScanShape
    norm: GatedNormShape
    state: LayerState
    products: Tensor | None
    """Room for the products of chunks; None: every row is scanned token by token."""

    def advance(self, x: Tensor, rows: RecurrentRows, chunks: RowChunks, longest: int) -> Tensor:
        size = self.scan.heads * self.scan.value_size
        # Zeros, since nothing is written for tokens without a sequence, which pad a graph.
        scanned = x.new_zeros(len(x), size, dtype=torch.float32)
        mixed = self._convolve(x, rows, longest)
        if self.products is not None and longest >= LEAST_CHUNKED:
            of_heads = self.weights.decay_bias, self.weights.rates, self.weights.skips
            scan_chunks(self.scan, mixed, x, *of_heads, self.state.matrices, rows, chunks, self.products, scanned)
        self._scan(mixed, x, rows, scanned, None if self.products is None else chunks)
        y = x.new_empty(len(x), size)
        gated_norm(self.norm, scanned, x, self.weights.norm, y)
        return y

    def commit(self, x: Tensor, rows: RecurrentRows) -> None:
        self._scan(self._convolve(x, rows, SEVERAL), x, rows, None, None)

    def _convolve(self, x: Tensor, rows: RecurrentRows, longest: int) -> Tensor:
        weights = self.weights
        mixed = x.new_empty(len(x), self.convolution.channels, dtype=torch.float32)
        convolve(self.convolution, x, weights.weight, weights.bias, self.state.inputs, rows, mixed, longest)
        return mixed

    def _scan(self, mixed: Tensor, x: Tensor, rows: RecurrentRows, y: Tensor | None, chunks: RowChunks | None) -> None:
        of_heads = self.weights.decay_bias, self.weights.rates, self.weights.skips
        scan(self.scan, mixed, x, *of_heads, self.state.matrices, rows, y, chunks)


def _make_mixer(layer: RecurrentLayer, shape: RecurrentShape, state: LayerState, products: Tensor | None) -> CudaMixer:
    match layer:
        case ConvolutionLayer():
            return CudaConvolution(layer, shape.convolution, state)
        case DeltaNetLayer():
            norm = layer.norm.view(1, -1)
            weights = ScanWeights(layer.weight, None, layer.dt_bias, layer.rates, None, norm)
        case Mamba2Layer():
            weights = ScanWeights(layer.weight, layer.bias, layer.dt_bias, layer.rates, layer.skips, layer.norm)
        case _:
            raise AssertionError(f"there is no such mixer: {type(layer).__name__}")
    assert shape.scan is not None
    assert shape.norm is not None
    products = products if is_chunked(shape.scan) else None
    return CudaScan(weights, shape.convolution, shape.scan, shape.norm, state, products)


class RecurrentLayers:
    """The recurrent layers of one model, by their number."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        states: Mapping[int, LayerState],
        shape: ModelShape,
        stride: int,
    ) -> None:
        """``states`` are the layers' parts of slots that are ``stride`` numbers apart."""
        self._layers: dict[int, tuple[RecurrentLayer, CudaMixer]] = {}
        products = None if shape.deterministic else self._take_room(shape, states)
        self._has_chunks = products is not None
        for index, (mixer, layer) in enumerate(zip(spec.recurrent, layers, strict=True)):
            if mixer is not None and layer.recurrent is not None:
                kind = recurrent_shape(mixer, spec.hidden_size, shape.dtype, stride)
                self._layers[index] = layer.recurrent, _make_mixer(layer.recurrent, kind, states[index], products)

    @staticmethod
    def _take_room(shape: ModelShape, states: Mapping[int, LayerState]) -> Tensor | None:
        """Allocates the room for the products of a layer's chunks, which all layers share. None: no layer has any."""
        sizes = [
            products_size(kind.scan) for kind in shape.recurrent if kind.scan is not None and is_chunked(kind.scan)
        ]
        if not sizes:
            return None
        device = next(iter(states.values())).inputs.device
        return torch.empty(shape.max_tokens * max(sizes), dtype=torch.float32, device=device)

    def changes(self) -> list[int]:
        """Returns the numbers of tokens of a step from which different kernels run."""
        return [LEAST_CHUNKED] if self._has_chunks else []

    def mix(self, index: int, x: Tensor, states: RecurrentStep, longest: int) -> Tensor:
        """Computes a layer's mixer, (T, hidden) -> (T, hidden), and advances the states by the tokens that are
        certain."""
        layer, mixer = self._layers[index]
        read: Tensor = layer.inputs(x)
        if states.sampled is not None:
            states.kept.append(read.index_select(0, states.sampled))
        return layer.output(mixer.advance(read, states.rows, states.chunks, longest))

    def commit(self, kept: Sequence[Tensor], rows: RecurrentRows) -> None:
        """Advances the states of all layers by tokens that were not certain. ``kept`` is what ``mix`` kept."""
        for (_, mixer), read in zip(self._layers.values(), kept, strict=True):
            mixer.commit(read, rows)
