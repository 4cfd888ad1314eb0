"""Reads all metrics at one moment, from the engine and from the service, and sets their labels.

Runs on the event loop for each scrape or push, a few times a minute; nothing is computed in between.
"""

import asyncio
import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from penstock.scheduler.engine_stats import EngineState, EngineStats
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import WorkerFacts
from penstock.service.telemetry import catalog as of
from penstock.service.telemetry.catalog import Instrument
from penstock.service.telemetry.event_loop_lag import MAX_SAMPLES, LoopLag
from penstock.service.telemetry.histogram import Distribution, Histogram
from penstock.service.telemetry.metrics import Metrics

READ_S = 5.0
"""How long a thread waits for the event loop."""
PROVIDER = "penstock"
_ENGINE = "0"
"""The value of vLLM's label ``engine``; there is one engine."""


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
        self._facts = facts
        self._metrics = metrics
        self._loop_lag = loop_lag
        self._model_name = model_name
        self._version = importlib.metadata.version("penstock")

    def read(self) -> list[Reading]:
        """Returns every metric, including those without a point."""
        stats = self._engine.stats()
        return [*self._now(stats), *self._totals(stats), *self._requests(), *self._genai(), *self._vllm(stats)]

    def _now(self, stats: EngineStats) -> Iterator[Reading]:
        facts = self._facts
        yield _of(
            of.INFO,
            1,
            self._version,
            self._model_name,
            facts.architecture,
            facts.backend,
            facts.device,
            facts.dtype,
            facts.quantization,
            facts.kv_cache_dtype,
        )
        states = [Point((state.name.lower(),), int(state is stats.state)) for state in EngineState]
        yield Reading(of.STATE, states)
        yield _of(of.LIVE_REQUESTS, stats.requests)
        yield _of(of.STALLED_REQUESTS, stats.stalled)
        yield _of(of.RUNNING_ROWS, stats.running)
        yield _of(of.WAITING_CHOICES, stats.waiting)
        yield _of(of.KV_USAGE, stats.kv_usage)
        yield _of(of.KV_BLOCKS, facts.num_blocks)
        yield _of(of.KV_CACHED_BLOCKS, stats.cached_blocks)
        yield _of(of.KV_RETAINED_BLOCKS, stats.retained_blocks)
        yield _of(of.KV_HOST_BLOCKS, stats.host_blocks)
        yield _of(of.MEDIAN_STEP, stats.step_s)
        predicted = [] if stats.predicted_ttft_s is None else [Point((), stats.predicted_ttft_s)]
        yield Reading(of.PREDICTED_FIRST_TOKEN, predicted)
        lag = self._loop_lag.over(MAX_SAMPLES)
        lags = [] if lag is None else [("p50", lag.p50_s), ("p99", lag.p99_s), ("max", lag.max_s)]
        yield Reading(of.LOOP_LAG, [Point((statistic,), seconds) for statistic, seconds in lags])

    def _totals(self, stats: EngineStats) -> Iterator[Reading]:
        yield _of(of.STEPS, stats.steps)
        yield _of(of.DECODE_ROWS, stats.decode_rows)
        yield _of(of.PREFILL_TOKENS, stats.prefill_tokens)
        yield _of(of.CACHED_TOKENS, stats.cached_tokens)
        yield _of(of.RESTORED_TOKENS, stats.restored_tokens)
        yield _of(of.OUTPUT_TOKENS, stats.output_tokens)
        drafts = stats.speculation
        yield _of(of.DRAFTS, drafts.steps)
        yield _by_position(of.DRAFTED_TOKENS, drafts.drafted_at)
        yield _by_position(of.ACCEPTED_TOKENS, drafts.accepted_at)
        yield _of(of.PREEMPTIONS, stats.preemptions)
        yield _of(of.WORKER_RESTARTS, stats.restarts)

    def _requests(self) -> Iterator[Reading]:
        metrics = self._metrics
        yield Reading(of.REQUESTS, [Point(labels, count) for labels, count in metrics.ends.items()])
        yield Reading(of.CALLS, [Point(labels, count) for labels, count in metrics.calls.items()])
        yield _histogram(of.INTER_TOKEN, metrics.inter_token)
        yield _histogram(of.QUEUE_TIME, metrics.queue_time)
        yield _histogram(of.PREFILL_TIME, metrics.prefill_time)
        totals = [((tenant,), total) for tenant, total in metrics.tenants.items()]
        yield Reading(of.TENANT_REQUESTS, [Point(tenant, total.requests) for tenant, total in totals])
        yield Reading(of.TENANT_PROMPT_TOKENS, [Point(tenant, total.prompt_tokens) for tenant, total in totals])
        yield Reading(of.TENANT_CACHED_TOKENS, [Point(tenant, total.cached_tokens) for tenant, total in totals])
        yield Reading(of.TENANT_OUTPUT_TOKENS, [Point(tenant, total.output_tokens) for tenant, total in totals])
        yield Reading(of.TENANT_LIVE, self._live_of_tenants())

    def _live_of_tenants(self) -> list[Point]:
        live = Counter(dict.fromkeys(self._metrics.tenants, 0))
        for use in self._engine.busy_tenants():
            live[self._metrics.tenant_label(use.name)] += use.num_live
        return [Point((tenant,), count) for tenant, count in live.items()]

    def _genai(self) -> Iterator[Reading]:
        kinds = [((name, PROVIDER, self._model_name), times) for name, times in self._metrics.operations.items()]
        bounds = of.GENAI_DURATION.bounds
        yield Reading(
            of.GENAI_DURATION,
            [
                Point((*labels, error), histogram.read(bounds))
                for labels, times in kinds
                for error, histogram in times.durations.items()
            ],
        )
        bounds = of.GENAI_FIRST_TOKEN.bounds
        yield Reading(of.GENAI_FIRST_TOKEN, [Point(labels, times.first_token.read(bounds)) for labels, times in kinds])
        bounds = of.GENAI_OUTPUT_TOKEN.bounds
        yield Reading(
            of.GENAI_OUTPUT_TOKEN, [Point(labels, times.output_token.read(bounds)) for labels, times in kinds]
        )

    def _vllm(self, stats: EngineStats) -> Iterator[Reading]:
        metrics, labels = self._metrics, (self._model_name, _ENGINE)
        is_caching = self._engine.config.enable_prefix_caching
        prompt_tokens = stats.prefill_tokens + stats.cached_tokens
        yield _of(of.VLLM_RUNNING, stats.running, *labels)
        yield _of(of.VLLM_WAITING, stats.waiting, *labels)
        yield _of(of.VLLM_KV_USAGE, stats.kv_usage, *labels)
        facts = self._facts
        layout = (str(facts.block_size), str(facts.num_blocks), facts.kv_cache_dtype, str(is_caching))
        yield _of(of.VLLM_CACHE_CONFIG, 1, *layout, _ENGINE)
        yield _of(of.VLLM_LORA, time.time(), "0", "", "")
        yield _of(of.VLLM_PROMPT_TOKENS, prompt_tokens, *labels)
        yield _of(of.VLLM_GENERATION_TOKENS, stats.output_tokens, *labels)
        yield _of(of.VLLM_PREFIX_QUERIES, prompt_tokens if is_caching else 0, *labels)
        yield _of(of.VLLM_PREFIX_HITS, stats.cached_tokens, *labels)
        yield _of(of.VLLM_PREEMPTIONS, stats.preemptions, *labels)
        yield _of(of.VLLM_DRAFTS, stats.speculation.steps, *labels)
        yield _of(of.VLLM_DRAFTED_TOKENS, stats.speculation.drafted, *labels)
        yield _of(of.VLLM_ACCEPTED_TOKENS, stats.speculation.accepted, *labels)
        yield _by_position(of.VLLM_ACCEPTED_PER_POSITION, stats.speculation.accepted_at, *labels)
        yield Reading(of.VLLM_SUCCESS, [Point((*labels, reason), count) for reason, count in metrics.finished.items()])
        histograms: Iterable[tuple[Instrument, Histogram]] = (
            (of.VLLM_FIRST_TOKEN, metrics.first_token),
            (of.VLLM_INTER_TOKEN, metrics.inter_token),
            (of.VLLM_REQUEST_OUTPUT_TOKEN, metrics.output_token),
            (of.VLLM_DURATION, metrics.duration),
            (of.VLLM_QUEUE_TIME, metrics.queue_time),
            (of.VLLM_PREFILL_TIME, metrics.prefill_time),
            (of.VLLM_DECODE_TIME, metrics.decode_time),
            (of.VLLM_INFERENCE_TIME, metrics.inference_time),
            (of.VLLM_REQUEST_PROMPT_TOKENS, metrics.prompt_tokens),
            (of.VLLM_REQUEST_OUTPUT_TOKENS, metrics.output_tokens),
        )
        for instrument, histogram in histograms:
            yield _histogram(instrument, histogram, *labels)


class LoopReader:
    """Reads metrics from other threads, through the event loop that it is created on."""

    def __init__(self, read: Callable[[], list[Reading]]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()

    def read(self) -> list[Reading]:
        """Returns every metric. Raises TimeoutError if the loop is too busy, or closed."""
        answer: Future[list[Reading]] = Future()

        def work() -> None:
            try:
                answer.set_result(self._read())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            raise TimeoutError("the event loop is closed") from None
        return answer.result(READ_S)


def _of(instrument: Instrument, value: float, *labels: str) -> Reading:
    return Reading(instrument, [Point(labels, value)])


def _by_position(instrument: Instrument, counts: Sequence[int], *labels: str) -> Reading:
    return Reading(instrument, [Point((*labels, str(index)), count) for index, count in enumerate(counts)])


def _histogram(instrument: Instrument, histogram: Histogram, *labels: str) -> Reading:
    return Reading(instrument, [Point(labels, histogram.read(instrument.bounds))])
