"""Throughput and latency of the last seconds: percentiles near the exact ones, and periods that end."""

import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from penstock.scheduler.engine_stats import Counters
from penstock.service.telemetry import metrics as metrics_module
from penstock.service.telemetry.histogram import LogHistogram
from penstock.service.telemetry.metrics import Metrics
from penstock.service.telemetry.recent_stats import MAX_SECONDS, RecentStats

PERCENTS = (50, 90, 99)
WITHIN = 0.05


def exact(values, percent):
    """The nearest rank, as statistics textbooks have it."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def histogram_of(values):
    histogram = LogHistogram()
    for value in values:
        histogram.observe(value)
    return histogram


@given(st.lists(st.floats(1e-6, 40_000), min_size=1, max_size=300), st.sampled_from(PERCENTS))
def test_a_percentile_is_within_5_percent(values, percent):
    found = histogram_of(values).percentile(percent)
    assert found == pytest.approx(exact(values, percent), rel=WITHIN)


def test_times_as_a_service_has_them():
    rng = random.Random(1)
    values = [rng.lognormvariate(-4, 1.5) for _ in range(20_000)]
    for percent in PERCENTS:
        assert histogram_of(values).percentile(percent) == pytest.approx(exact(values, percent), rel=WITHIN)


def test_nothing_is_zero_and_extremes_take_no_more_memory():
    assert LogHistogram().percentile(50) == 0.0
    extremes = histogram_of([0.0, 1e-12, 1e9, 1e300])
    assert extremes.count == 4
    assert extremes.percentile(50) < 2e-6
    assert extremes.percentile(99) > 40_000
    everything = histogram_of(10 ** random.Random(2).uniform(-9, 9) for _ in range(50_000))
    assert len(everything.counts) < 400


def test_a_sum_has_all_values():
    parts = [[0.001] * 3, [0.1], [], [0.001, 5.0]]
    total = LogHistogram.sum(map(histogram_of, parts))
    assert total.count == 6
    assert total.counts == histogram_of([value for part in parts for value in part]).counts


@pytest.fixture
def minute():
    """A minute whose seconds pass when the test says so."""
    now = SimpleNamespace(s=100.0)
    counters, metrics = Counters(), Metrics()
    recent = RecentStats(lambda: counters, metrics, lambda: now.s)

    def second(first_token_s=None, output_tokens=0, prefill_tokens=0, finished=0):
        counters.output_tokens += output_tokens
        counters.prefill_tokens += prefill_tokens
        metrics.finished["stop"] += finished
        if first_token_s is not None:
            metrics.recent.first_token.observe(first_token_s)
        now.s += 1.0
        recent.begin_second()

    return SimpleNamespace(now=now, metrics=metrics, recent=recent, second=second)


def test_a_period_has_its_seconds_and_no_others(minute):
    for number in range(100):
        minute.second(first_token_s=1.0 + number, output_tokens=number, prefill_tokens=2 * number, finished=1)
    for length in (10, 60):
        window = minute.recent.over(length)
        numbers = range(100 - (length - 1), 100)  # the current second has just begun
        assert window.seconds == length - 1
        assert window.output_tokens == sum(numbers)
        assert window.prefill_tokens == 2 * sum(numbers)
        assert window.finished_requests == len(numbers)
        assert window.first_token.count == len(numbers)
        assert window.first_token.percentile(50) == pytest.approx(1.0 + numbers[len(numbers) // 2], rel=WITHIN)
    assert len(minute.recent._seconds) == MAX_SECONDS


def test_the_current_second_counts(minute):
    minute.second()
    minute.metrics.finished["abort"] += 1
    minute.metrics.recent.inter_token.observe(0.01, 3)
    minute.now.s += 0.5
    window = minute.recent.over(10)
    assert (window.seconds, window.finished_requests, window.inter_token.count) == (1.5, 1, 3)
    assert window.inter_token.percentile(90) == pytest.approx(0.01, rel=WITHIN)


def test_a_young_service_reports_as_long_as_it_has_run(minute):
    minute.now.s += 0.25
    window = minute.recent.over(60)
    assert (window.seconds, window.finished_requests, window.first_token.count) == (0.25, 0, 0)
    for _ in range(3):
        minute.second(finished=2)
    assert minute.recent.over(60).seconds == 3.25
    assert minute.recent.over(60).finished_requests == 6


def test_quiet_seconds_leave_nothing(minute):
    minute.second(first_token_s=1.0, output_tokens=5, finished=1)
    for _ in range(MAX_SECONDS):
        minute.second()
    window = minute.recent.over(60)
    assert (window.finished_requests, window.output_tokens, window.first_token.count) == (0, 0, 0)


@pytest.fixture
def meter(monkeypatch):
    """The meter of a request that arrived at 10 s, and a clock that the test sets."""
    now = SimpleNamespace(s=10.0)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    metrics = Metrics()
    meter = metrics.request(10.0)

    def delta(at, choice, num_tokens):
        now.s = at
        meter.delta(choice, num_tokens)

    return SimpleNamespace(metrics=metrics, delta=delta)


def test_the_time_between_deltas_is_shared_by_the_tokens_of_the_later_one(meter):
    meter.delta(10.5, 0, 2)
    meter.delta(10.6, 1, 1)  # another choice's first one is neither
    meter.delta(10.8, 0, 3)
    meter.delta(10.9, 0, 0)  # only the end
    recent = meter.metrics.recent
    assert recent.first_token.count == 1
    assert recent.first_token.percentile(50) == pytest.approx(0.5, rel=WITHIN)
    assert recent.inter_token.count == 3
    assert recent.inter_token.percentile(50) == pytest.approx(0.1, rel=WITHIN)
    # The metrics count deltas.
    assert sum(meter.metrics.inter_token._counts) == 2


class FakeLoop:
    """Its timers fire when the test says so."""

    def __init__(self):
        self.timers = []

    def call_later(self, delay, callback, *arguments):
        self.timers.append(SimpleNamespace(delay=delay, fire=lambda: callback(*arguments), cancel=self.timers.clear))
        return self.timers[-1]


def test_the_timer_begins_seconds_until_it_is_stopped(minute):
    loop = FakeLoop()
    minute.recent.stop()
    minute.recent.start(loop)
    for _ in range(5):
        minute.now.s += 1.0
        timer = loop.timers.pop()
        assert timer.delay == 1.0
        timer.fire()
        assert minute.metrics.recent is minute.recent._seconds[-1].latencies
    assert minute.recent.over(3).seconds == 2.0
    minute.recent.stop()
    assert loop.timers == []
