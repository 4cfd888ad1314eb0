"""The definition of a metric: its name, kind, unit, labels and reader. The catalogue has all metrics."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from penstock.scheduler.engine_stats import Counters, EngineStats
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.histogram import Histogram
from penstock.service.telemetry.metrics import Metrics

_SUFFIXES = {"s": "_seconds", "1": "_ratio", "By": "_bytes"}
_VLLM = "vllm:"

Value = float | Histogram
LabelledValues = Iterable[tuple[tuple[str, ...], Value]]
"""The values of a metric, each with its labels in the order of the instrument's."""


class MetricKind(Enum):
    """The type of a metric."""

    COUNTER = auto()
    """A total since the start of the process."""
    GAUGE = auto()
    HISTOGRAM = auto()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The objects that metrics are read from. Nothing else runs while they are read."""

    engine: Engine
    facts: WorkerFacts
    metrics: Metrics
    loop_lag: LoopLag
    model_name: str
    version: str
    """The version of penstock."""
    counters: Counters
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric."""

    name: str
    kind: MetricKind
    unit: str
    """In UCUM: s, 1 for a share, {token} for a count of tokens; empty for metrics that are always 1."""
    read: Callable[[Snapshot], Value | LabelledValues | None]
    """Returns the value, or one value for each combination of labels; None while nothing is known. Labels that all
    metrics share, such as the model's name, are added later."""
    meaning: str
    """One sentence."""
    labels: tuple[str, ...] = ()
    """OpenTelemetry's attributes; in Prometheus, underscores replace the dots."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets."""

    @property
    def is_prometheus_only(self) -> bool:
        """Whether OpenTelemetry does not allow the name, because it has a colon."""
        return self.name.startswith(_VLLM)

    @property
    def prometheus_name(self) -> str:
        if self.is_prometheus_only:
            return self.name
        suffix = "_total" if self.kind is MetricKind.COUNTER else ""
        return self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "") + suffix
