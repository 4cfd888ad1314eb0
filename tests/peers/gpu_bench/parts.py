"""The parts of a run, the most important ones first, each with its time limit."""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu_bench.apart import Failed, Send, run_apart
from gpu_bench.figures import BASELINE, TABLES, VARIANTS, Ceiling, Figures, LeftOut, table_of
from gpu_bench.sizes import Model, Sizes

MIN_SECONDS = 10.0
"""With less no part begins."""
PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass
class Results:
    """The results so far."""

    about: dict[str, Any] = field(default_factory=dict)
    """The device and the versions of packages."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {name: [] for name in TABLES})
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def ceiling(self) -> Ceiling | None:
        """None if it was not measured."""
        return Ceiling(**self.tables["ceilings"][0]) if self.tables["ceilings"] else None

    def unchanged_s(self, model: Model) -> dict[str, float]:
        """Returns the seconds of each step of the variant without a change."""
        lines = (line for line in self.tables["variants"] if (line["model"], line["variant"]) == (model.name, BASELINE))
        return {line["step"]: line["seconds"] for line in lines}

    def ours_per_s(self, model: Model) -> float | None:
        """Returns the tokens per second of our service."""
        lines = (line for line in self.tables["serving"] if line["model"] == model.name and line["ratio"] == 1.0)
        return next((line["tokens_per_s"] for line in lines), None)


Measure = Callable[[Results], Iterable[Figures | LeftOut]]


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    seconds: float
    """The time limit."""
    measure: Measure


def parts(sizes: Sizes) -> list[Part]:
    """Returns all parts."""
    first, *others = sizes.models
    return [
        Part("ceilings", 20, partial(_ceilings, sizes)),
        Part("kernels", 110, partial(_kernels, sizes)),
        Part("products", 40, partial(_products, sizes)),
        Part("peers", 60, partial(_peers, sizes)),
        *(Part(f"accuracy {model.name}", 30, partial(_accuracy, model, sizes)) for model in sizes.models),
        *(Part(f"steps {model.name}", 100, partial(_steps, model, sizes)) for model in reversed(sizes.models)),
        *_service(first, sizes),
        Part("deterministic steps", 45, partial(_deterministic_steps, first, sizes)),
        Part("deterministic service", 60, partial(_deterministic_service, first, sizes)),
        *(part for model in others for part in _service(model, sizes)),
        Part(f"steps fp8 {sizes.models[-1].name}", 60, partial(_fp8_steps, sizes.models[-1], sizes)),
        Part("latents", 90, partial(_latents, sizes)),
        *(Part(f"variants {name}", 60, partial(_variant, name, sizes.models[-1], sizes)) for name in VARIANTS),
    ]


def _service(model: Model, sizes: Sizes) -> list[Part]:
    return [
        Part(f"serving {model.name}", 120, partial(_serving, model, sizes)),
        Part(f"transformers {model.name}", 75, partial(_transformers, model, sizes)),
    ]


def run(part: Part, seconds: float, results: Results) -> None:
    """Runs a part and adds its lines to the results, and the reason for what it left out."""
    if seconds < MIN_SECONDS:
        results.left_out.append(LeftOut(part.name, "all of it", "no time was left"))
        return
    began = time.monotonic()
    try:
        for line in run_apart(partial(_send_all, part, results), min(seconds, part.seconds)):
            match line:
                case {"table": table, "line": figures}:
                    results.tables[table].append(figures)
                case {"left_out": left_out}:
                    results.left_out.append(LeftOut(**left_out))
                case {"about": about}:
                    results.about |= about
    except Failed as failed:
        results.left_out.append(LeftOut(part.name, "what has no line", str(failed)))
    print(f"{part.name}: {time.monotonic() - began:.0f} s", flush=True)


def _send_all(part: Part, results: Results, send: Send) -> None:
    try:
        send({"about": _about()})
        for line in part.measure(results):
            if isinstance(line, LeftOut):
                send({"left_out": asdict(line)})
            else:
                send({"table": table_of(line), "line": asdict(line)})
    except ModuleNotFoundError as error:
        send({"left_out": asdict(LeftOut(part.name, "all of it", f"{error.name} is not installed"))})


def _about() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: Triton's interpreter"
    return {"device": name, "cuda": torch.version.cuda, "python": sys.version.split()[0], **_versions()}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


# These functions run in processes of their own. They import packages there that some machines lack.


def _ceilings(sizes: Sizes, _results: Results) -> Iterable[Figures]:
    from gpu_bench import ceilings

    yield ceilings.measure(sizes)


def _kernels(sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench.kernels import attention, experts, layers, recurrent, sampling
    from gpu_bench.kernels.cases import measure

    cases = [*layers.CASES, *attention.CASES, *sampling.CASES]
    yield from measure(cases, sizes.models, sizes, results.ceiling)
    yield from measure(experts.CASES, sizes.mixtures, sizes, results.ceiling)
    yield from measure(recurrent.CASES, sizes.hybrids, sizes, results.ceiling)


def _products(sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench.kernels.cases import measure
    from gpu_bench.kernels.layers import DENSE

    return measure(DENSE, sizes.models[-1:], sizes, results.ceiling)


def _peers(sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench.kernels import libraries
    from gpu_bench.kernels.cases import measure

    yield from measure(libraries.CASES, sizes.models[-1:], sizes, results.ceiling)
    yield from measure(libraries.EXPERTS, sizes.mixtures[-1:], sizes, results.ceiling)


def _latents(sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench.kernels.cases import measure
    from gpu_bench.kernels.latent import CASES

    return measure(CASES, sizes.latents, sizes, results.ceiling)


def _variant(name: str, model: Model, sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench import variants

    return variants.measure(name, model, sizes, results.unchanged_s(model))


def _accuracy(model: Model, sizes: Sizes, _results: Results) -> Iterable[Figures]:
    from gpu_bench import accuracy

    return accuracy.measure(model, sizes)


def _steps(model: Model, sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench import steps

    return steps.measure(model, sizes, results.ceiling)


def _deterministic_steps(model: Model, sizes: Sizes, _results: Results) -> Iterable[Figures]:
    from gpu_bench import steps

    return steps.compare(model, sizes)


def _deterministic_service(model: Model, sizes: Sizes, results: Results) -> Iterable[Figures]:
    import_module("penstock.service.app.serve")
    from gpu_bench import serving

    return serving.measure_deterministic(model, sizes, results.ours_per_s(model))


def _serving(model: Model, sizes: Sizes, _results: Results) -> Iterable[Figures]:
    # What the service itself needs, which is another process.
    import_module("penstock.service.app.serve")
    from gpu_bench import serving

    return serving.measure(model, sizes)


def _transformers(model: Model, sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench import transformers_peer

    return transformers_peer.measure(model, sizes, results.ours_per_s(model))


def _fp8_steps(model: Model, sizes: Sizes, results: Results) -> Iterable[Figures | LeftOut]:
    from gpu_bench import steps

    return steps.measure_fp8(model, sizes, results.ceiling)
