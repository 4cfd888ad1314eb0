"""Readings: what a row's reader returns becomes points with the labels of the row."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.service.telemetry import collector
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.histogram import Distribution, Histogram
from penstock.service.telemetry.instrument import Instrument, MetricKind
from penstock.service.telemetry.metrics import Metrics


@pytest.fixture
def read(monkeypatch):
    """Returns labels and value of each point of a metric with this reader."""

    def read(reader, labels=(), bounds=()):
        instrument = Instrument("a.b", MetricKind.GAUGE, "s", reader, "A metric.", labels, bounds)
        monkeypatch.setattr(collector, "INSTRUMENTS", (instrument,))
        engine: Any = SimpleNamespace(counters=None, stats=lambda: SimpleNamespace(running=3))
        facts: Any = None
        [reading] = collector.MetricsReader(engine, facts, Metrics(), LoopLag(), "model").read()
        assert reading.instrument is instrument
        return [tuple(point) for point in reading.points]

    return read


def test_a_number_is_one_point(read):
    assert read(lambda now: now.stats.running) == [((), 3)]
    assert read(lambda now: 0) == [((), 0)]


def test_an_unknown_number_has_no_point(read):
    assert read(lambda now: None) == []


def test_each_label_has_its_point(read):
    assert read(lambda now: {("x",): 1, ("y",): 2}.items(), ("letter",)) == [(("x",), 1), (("y",), 2)]
    assert read(lambda now: {("x", ""): 1}.items(), ("letter", "error")) == [(("x", ""), 1)]
    assert read(lambda now: [], ("letter",)) == []


def test_labels_that_metrics_share_are_filled_in(read):
    assert read(lambda now: 3, ("model_name", "engine")) == [(("model", "0"), 3)]
    points = read(lambda now: [(("chat", ""), 1)], ("operation", "gen_ai.request.model", "error"))
    assert points == [(("chat", "model", ""), 1)]


def test_a_histogram_is_read_with_the_bounds_of_its_row(read):
    histogram = Histogram((1.0, 2.0, 3.0))
    histogram.observe(1.5)
    assert read(lambda now: histogram, bounds=(1.0, 3.0)) == [((), Distribution((1.0, 3.0), (0, 1, 0), 1.5))]
    assert read(lambda now: [(("x",), histogram)], ("letter",), (3.0,)) == [(("x",), Distribution((3.0,), (1, 0), 1.5))]
