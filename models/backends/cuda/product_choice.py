"""Chooses between torch, whose products are cuBLAS's, and the kernels for products of few tokens with float weights.
Which of them is faster depends on the GPU, the weight's shape and the number of tokens, so it is measured when a model
is loaded."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from penstock.kernels.cuda.skinny_gemm import BUCKETS

logger = logging.getLogger(__name__)

TOKEN_BUCKETS = (1, *BUCKETS)
"""The largest numbers of tokens for which the same kernel computes a product."""
SECONDS = 1.0
"""No measurement begins after this time. The kernels compute products that were not measured."""

Clock = Callable[[], float]
SecondsOf = Callable[[Callable[[], object]], float]
"""Returns the time that the device takes for a call."""


@dataclass(frozen=True, order=True)
class ProductForm:
    """What a choice applies to: products with weights of a shape, of numbers of tokens in one bucket."""

    rows: int
    columns: int
    max_tokens: int
    """One of TOKEN_BUCKETS."""

    @property
    def tokens_text(self) -> str:
        """The numbers of tokens, such as 17-32."""
        least = (0, *TOKEN_BUCKETS)[TOKEN_BUCKETS.index(self.max_tokens)] + 1
        return str(least) if least == self.max_tokens else f"{least}-{self.max_tokens}"


@dataclass(frozen=True)
class ProductCandidates:
    """The two ways to compute a product, with the activation that belongs to it. Each computes it with several weights
    of the same shape, if the model has them: one weight would stay in the GPU's cache."""

    form: ProductForm
    by_kernels: Callable[[], object]
    by_torch: Callable[[], object]
    num_weights: int = 1


@dataclass(frozen=True)
class MeasuredProduct:
    """The times for one product."""

    form: ProductForm
    kernels_s: float
    torch_s: float
    is_torchs: bool
    """Whether torch computes it from now on. All ranks that share a model must agree."""


class ProductChoice:
    """Knows which products of few tokens torch computes. Before ``measure`` the kernels compute all of them."""

    def __init__(self) -> None:
        self.measured: list[MeasuredProduct] = []
        self._torchs: set[ProductForm] = set()

    def is_torchs(self, rows: int, columns: int, num_tokens: int) -> bool:
        """Whether torch computes the product of at most 64 tokens with a weight of that shape."""
        if not self._torchs:
            return False
        bucket = next(bucket for bucket in TOKEN_BUCKETS if num_tokens <= bucket)
        return ProductForm(rows, columns, bucket) in self._torchs

    def measure(
        self,
        candidates: Iterable[ProductCandidates],
        seconds_of: SecondsOf,
        least: Callable[[int], int],
        clock: Clock = time.monotonic,
    ) -> None:
        """Measures both ways of each product, and chooses the faster one. ``least`` is that of ``TensorParallel``: if
        ranks computed the same product in two ways, their bits would differ, so torch computes it only if it is faster
        on every rank. Logs the choice."""
        times, took = dict[ProductForm, tuple[float, float]](), 0.0
        forms = list[ProductForm]()
        for each in candidates:
            forms.append(each.form)
            if took >= SECONDS:
                continue
            # The first run may compile, which must not use up the time.
            each.by_kernels()
            each.by_torch()
            began = clock()
            try:
                kernels_s, torch_s = (seconds_of(way) / each.num_weights for way in (each.by_kernels, each.by_torch))
            except RuntimeError as error:  # such as for lack of memory: no choice is worth a failed start
                logger.warning("products of few tokens cannot be measured: %s", error)
                took = SECONDS
                continue
            took += clock() - began
            times[each.form] = kernels_s, torch_s
        # Ranks may have different products: in a model in stages, only rank 0 has the head.
        have_same = least(len(forms)) == -least(-len(forms))
        for form in forms if have_same else []:
            kernels_s, torch_s = times.get(form, (0.0, 0.0))
            if least(int(torch_s < kernels_s)):
                self._torchs.add(form)
        self.measured = [MeasuredProduct(form, *seconds, form in self._torchs) for form, seconds in times.items()]
        if forms:
            logger.info("%s", self._text(len(forms) - len(times)))

    def _text(self, num_unmeasured: int) -> str:
        by_shape = groupby(sorted(self._torchs), key=lambda form: (form.rows, form.columns))
        torchs = [
            f"{rows} x {columns} of {', '.join(form.tokens_text for form in forms)} tokens"
            for (rows, columns), forms in by_shape
        ]
        rest = f" ({num_unmeasured} were not measured)" if num_unmeasured else ""
        if not torchs:
            return f"products of up to {TOKEN_BUCKETS[-1]} tokens: the kernels compute all of them{rest}"
        return f"products of few tokens that cuBLAS computes, which was faster here: {'; '.join(torchs)}{rest}"
