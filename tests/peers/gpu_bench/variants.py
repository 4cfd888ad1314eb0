"""What the backend's choices are worth: the same steps, with one choice made otherwise. Each variant is loaded in a
process of its own, whose modules it may change."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from gpu_bench.figures import VARIANTS, VariantFigures
from gpu_bench.sizes import Model, Sizes
from gpu_bench.steps import Bench
from penstock.kernels.cuda.attention.plan import DecodeShape
from penstock.kernels.cuda.core import launch
from penstock.models.backends.cuda.attention_libraries import LIBRARIES
from penstock.models.backends.cuda.experts import ExpertLayers
from penstock.models.backends.cuda.linear import CudaLinears
from penstock.models.backends.cuda.product_choice import ProductChoice

MOST_ROWS = 32


@dataclass(frozen=True)
class Change:
    """A choice that is made otherwise."""

    apply: Callable[[], None] = lambda: None
    """Changes the backend before it is loaded."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``WorkerConfig``."""


def _measure_nothing() -> None:
    """Has the kernels compute all products of few tokens."""
    CudaLinears.measure = lambda *_, **__: None  # type: ignore[method-assign]
    ExpertLayers.measure = lambda *_, **__: None  # type: ignore[method-assign]


def _choose_torch() -> None:
    """Has cuBLAS compute all products, with a kernel of its own for the activation."""
    ProductChoice.is_torchs = lambda *_: True  # type: ignore[method-assign]


def _launch_late() -> None:
    """No kernel starts before the last one has ended: without programmatic dependent launch."""
    launch.PDL_CAPABILITY = 1000


def _merge_by_a_kernel() -> None:
    """Has a kernel merge the pieces of attention, not the last program that computes one."""
    DecodeShape.is_merged_by_last = property(lambda _: False)  # type: ignore[assignment,method-assign]


def _extend_nothing() -> None:
    """Does not divide the context of a few new tokens over the GPU."""
    DecodeShape.extended = property(lambda _: None)  # type: ignore[assignment,method-assign]


def _require(module: str) -> None:
    if find_spec(module) is None:
        raise ModuleNotFoundError(name=module)


def _attend_by(name: str) -> Change:
    return Change(partial(_require, LIBRARIES[name].module), {"attention_backend": name})


CHANGES = dict(
    zip(
        VARIANTS,
        (
            Change(),
            Change(_measure_nothing),
            Change(_choose_torch),
            Change(_launch_late),
            Change(_merge_by_a_kernel),
            Change(_extend_nothing),
            Change(config={"kv_cache_dtype": "fp8"}),
            _attend_by("flashinfer"),
            _attend_by("fa"),
        ),
        strict=True,
    )
)


def measure(name: str, model: Model, sizes: Sizes, unchanged_s: Mapping[str, float]) -> Iterator[VariantFigures]:
    """Yields decoding steps, a chat's next turn and a prompt. ``unchanged_s`` has the seconds of each without a change,
    if they were measured."""
    change = CHANGES[name]
    change.apply()
    batches = tuple(batch for batch in sizes.batches if batch <= MOST_ROWS)
    bench = Bench(model, replace(sizes, batches=batches), **change.config)
    runs: dict[str, Callable[[], float]] = {}
    for context in sizes.contexts[:2]:
        for batch in batches:
            if bench.fits(batch, context):
                runs[f"decode {batch} x {context}"] = partial(_decode, bench, batch, context)
    turn, context = sizes.turns[len(sizes.turns) // 2], sizes.contexts[-1]
    runs[f"{turn} new tokens after {context}"] = partial(bench.turn, context, turn)
    prompt = sizes.prompts[min(1, len(sizes.prompts) - 1)]
    runs[f"prompt of {prompt}"] = partial(bench.prefill, prompt)
    for step, run in runs.items():
        seconds = run()
        yield VariantFigures(model.name, name, step, seconds, seconds / unchanged_s.get(step, seconds))


def _decode(bench: Bench, batch: int, context: int) -> float:
    return bench.decode(batch, context).step_s
