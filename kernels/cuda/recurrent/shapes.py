"""The kinds of recurrent layers that kernels are compiled for."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.recurrent.chunk_products import is_chunked
from penstock.kernels.cuda.recurrent.chunked_scan import chunked_scan_variants
from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape, convolution_variant
from penstock.kernels.cuda.recurrent.gated_norm import GatedNormShape, gated_norm_variant
from penstock.kernels.cuda.recurrent.scan import ScanShape, scan_variant


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """A kind of recurrent layer."""

    convolution: ConvolutionShape
    scan: ScanShape | None = None
    """None: the layer is only a convolution."""
    norm: GatedNormShape | None = None
    """Given with ``scan``."""
    products: tuple[tuple[int, int, bool], ...]
    """The linears of the input and of the output, each as outputs, inputs, and whether there is a bias."""


def recurrent_variants(shape: RecurrentShape, *, commits: bool, deterministic: bool) -> Iterator[KernelVariant]:
    """All kernels that a layer of this kind launches. ``commits``: also those that advance states after a step.
    ``deterministic``: a row's results do not depend on how it is cut into steps."""
    convolution = shape.convolution
    for longest in (1, 2):
        yield convolution_variant(convolution, convolution.block_tokens(longest))
    if shape.scan is None or shape.norm is None:
        if commits:
            yield convolution_variant(convolution, convolution.block_tokens(2), has_result=False)
        return
    yield gated_norm_variant(shape.norm)
    has_chunks = not deterministic and is_chunked(shape.scan)
    yield scan_variant(shape.scan, has_chunks=has_chunks)
    if has_chunks:
        yield from chunked_scan_variants(shape.scan)
    if commits:
        yield scan_variant(shape.scan, has_result=False)
