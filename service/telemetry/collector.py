"""Reads all metrics at one moment, from the engine and from the service, and sets their labels.

Runs on the event loop for each scrape or push, a few times a minute; nothing is computed in between.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from penstock.clients.host.distribution import installed_version
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.telemetry.catalog import INSTRUMENTS, STATE, state_points
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.histogram import Distribution, Histogram
from penstock.service.telemetry.instrument import Instrument, Snapshot
from penstock.service.telemetry.metrics import Metrics

T = TypeVar("T")

READ_S = 5.0
"""How long a thread waits for the event loop."""


class Point(NamedTuple):
    """One value of a metric."""

    labels: tuple[str, ...]
    """In the order of the instrument's labels. Empty ones are not sent to OpenTelemetry."""
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Reading:
    """The current values of one metric."""

    instrument: Instrument
    points: list[Point]


class MetricsReader:
    """Reads the metrics of one service."""

    def __init__(
        self, engine: Engine, facts: WorkerFacts, metrics: Metrics, loop_lag: LoopLag, model_name: str
    ) -> None:
        self._engine = engine
        version = installed_version()
        self._snapshot = partial(Snapshot, engine, facts, metrics, loop_lag, model_name, version)
        common = {
            "model_name": model_name,
            "engine": "0",  # there is one engine
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": model_name,
        }
        self._rows = [(instrument, [common.get(name) for name in instrument.labels]) for instrument in INSTRUMENTS]

    def read(self) -> list[Reading]:
        """Returns every metric, including those without a point."""
        now = self._snapshot(self._engine.counters, self._engine.stats())
        return [Reading(instrument, _points(instrument, common, now)) for instrument, common in self._rows]


def _points(instrument: Instrument, common: list[str | None], now: Snapshot) -> list[Point]:
    """Reads one metric. ``common`` has None for each label whose value the reader returns."""
    found = instrument.read(now)
    if found is None:
        return []
    if isinstance(found, (int, float, Histogram)):
        found = [((), found)]
    if any(common):
        found = [(_merge(common, labels), value) for labels, value in found]
    return [
        Point(labels, value.read(instrument.bounds) if isinstance(value, Histogram) else value)
        for labels, value in found
    ]


def _merge(common: list[str | None], labels: tuple[str, ...]) -> tuple[str, ...]:
    own = iter(labels)
    return tuple([next(own) if label is None else label for label in common])


def read_starting() -> list[Reading]:
    """Returns the metrics of a service that is starting: only the state has a value."""
    return [Reading(STATE, [Point(labels, value) for labels, value in state_points(EngineState.STARTING)])]


def from_threads(read: Callable[[], T]) -> Callable[[], T]:
    """Returns a function that calls ``read`` on the current event loop, from other threads. It raises TimeoutError if
    the loop is too busy, or closed."""
    loop = asyncio.get_running_loop()

    def read_on_loop() -> T:
        answer: Future[T] = Future()

        def work() -> None:
            try:
                answer.set_result(read())
            except Exception as error:
                answer.set_exception(error)

        try:
            loop.call_soon_threadsafe(work)
        except RuntimeError:
            raise TimeoutError("the event loop is closed") from None
        return answer.result(READ_S)

    return read_on_loop
