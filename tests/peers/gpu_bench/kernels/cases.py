"""Every kernel on inputs of a model's shape: against its reference in fp32, and then timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_bench.figures import Ceiling, Figures, KernelFigures, LeftOut
from gpu_bench.sizes import Model, Sizes
from gpu_bench.timing import seconds

ULP = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""What a result may differ by, as a share of the largest: two steps of the dtype, and rounding on the way there."""


@dataclass(frozen=True)
class Case:
    """A kernel and its inputs."""

    kernel: str
    text: str
    """Which inputs."""
    error: Callable[[], float]
    """Runs it once, and returns the distance of the result from the reference."""
    allowed: float
    run: Callable[[], object]
    num_bytes: float = 0.0
    """That must be read and written."""
    products: float = 0.0
    """Floating-point operations of matrix products."""


Make = Callable[[Model, Sizes, torch.device], Case]


def measure(
    makers: Sequence[Make], models: Sequence[Model], sizes: Sizes, ceiling: Ceiling | None
) -> Iterator[Figures | LeftOut]:
    """Every case on every model. One that fails is left out, and the others go on."""
    device = torch.device(sizes.device)
    for model in models:
        for make in makers:
            torch.manual_seed(0)
            try:
                yield _figures(model, make(model, sizes, device), device, ceiling)
            except Exception as error:
                # After a kernel that broke the device, all others fail. Each has its own line.
                yield LeftOut("kernels", f"{model.name} {_name(make)}", f"{type(error).__name__}: {error}"[:300])


def _name(make: Make) -> str:
    if isinstance(make, partial):
        return f"{make.func.__name__} {make.keywords}"
    return getattr(make, "__name__", "")


def _figures(model: Model, case: Case, device: torch.device, ceiling: Ceiling | None) -> KernelFigures:
    error = case.error()
    took = seconds(case.run, device)
    bandwidth = case.num_bytes / ceiling.copied_bytes_per_s if ceiling else 0.0
    products = case.products / ceiling.products_per_s if ceiling else 0.0
    return KernelFigures(
        model=model.name,
        kernel=case.kernel,
        case=case.text,
        error=error,
        allowed=case.allowed,
        is_right=error <= case.allowed,
        seconds=took,
        limit="products" if products > bandwidth else "bandwidth",
        share=max(bandwidth, products) / took,
    )


def distance(made: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest expected number; a NaN is infinite."""
    worst = (made.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(worst.nan_to_num(float("inf")))
