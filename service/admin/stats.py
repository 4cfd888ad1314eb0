"""WatchStats: sends the statistics of the engine, the event loop and the last minute at an interval. Counts nothing
itself."""

import asyncio
import time
from typing import Any

import grpc

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.service.config.durations import to_duration, to_seconds
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming.messages import SERVICE_STATES
from penstock.service.telemetry.event_loop_lag import PERIOD_S, Lag, LoopLag
from penstock.service.telemetry.histogram import LogHistogram
from penstock.service.telemetry.recent_stats import RecentStats, RecentWindow
from penstock.service.transport.call_end import write

DEFAULT_INTERVAL_S = 1.0
MAX_TENANTS = 64


class StatsFeed:
    """Serves all subscribers. The reported uptime is that of this object."""

    def __init__(self, engine: Engine, loop_lag: LoopLag, recent_stats: RecentStats) -> None:
        self._engine = engine
        self._loop_lag = loop_lag
        self._recent_stats = recent_stats
        self._began = time.monotonic()
        self._closed = asyncio.Event()

    async def WatchStats(self, request: pb.WatchStatsRequest, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Sends statistics at once and after every interval, until the caller leaves or the service ends. The request
        has been validated."""
        interval_s = to_seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
        num_reported = self._loop_lag.num_samples - round(interval_s / PERIOD_S)
        await context.send_initial_metadata(())
        while True:
            num_samples = self._loop_lag.num_samples
            lag = self._loop_lag.over(num_samples - num_reported)
            num_reported = num_samples
            await write(context, self._read(lag))
            try:
                async with asyncio.timeout(interval_s):
                    await self._closed.wait()
            except TimeoutError:
                continue
            raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")

    def close(self) -> None:
        self._closed.set()

    def _read(self, lag: Lag | None) -> pb.WatchStatsResponse:
        stats = self._engine.stats()
        return pb.WatchStatsResponse(
            state=SERVICE_STATES[stats.state],
            uptime=to_duration(time.monotonic() - self._began),
            live_requests=stats.requests,
            running_rows=stats.running,
            waiting_choices=stats.waiting,
            stalled_requests=stats.stalled,
            kv_usage=stats.kv_usage,
            cached_blocks=stats.cached_blocks,
            retained_blocks=stats.retained_blocks,
            host_blocks=stats.host_blocks,
            steps=stats.steps,
            prefill_tokens=stats.prefill_tokens,
            cached_tokens=stats.cached_tokens,
            restored_tokens=stats.restored_tokens,
            state_slots_used=stats.state_slots_used,
            state_snapshots=stats.state_snapshots,
            state_hits=stats.state_hits,
            state_misses=stats.state_misses,
            state_missed_tokens=stats.state_missed_tokens,
            output_tokens=stats.output_tokens,
            drafts=stats.speculation.steps,
            drafted_tokens=stats.speculation.drafted,
            accepted_tokens=stats.speculation.accepted,
            preemptions=stats.preemptions,
            finished_requests=stats.finished,
            refused_requests=stats.refused,
            worker_restarts=stats.restarts,
            step_duration=to_duration(stats.step_s) if stats.step_s else None,
            predicted_ttft=None if stats.predicted_ttft_s is None else to_duration(stats.predicted_ttft_s),
            loop_lag=None if lag is None else _loop_lag(lag),
            tenants=[
                pb.TenantStats(tenant=use.name, live_requests=use.num_live, served_tokens=use.served)
                for use in self._engine.busiest_tenants(MAX_TENANTS)
            ],
            last_10s=_window(self._recent_stats.over(10)),
            last_60s=_window(self._recent_stats.over(60)),
        )


def _loop_lag(lag: Lag) -> pb.LoopLag:
    return pb.LoopLag(p50=to_duration(lag.p50_s), p99=to_duration(lag.p99_s), max=to_duration(lag.max_s))


def _window(recent: RecentWindow) -> pb.StatsWindow:
    return pb.StatsWindow(
        duration=to_duration(recent.seconds),
        finished_requests=recent.finished_requests,
        prefill_tokens=recent.prefill_tokens,
        output_tokens=recent.output_tokens,
        time_to_first_token=_percentiles(recent.first_token),
        inter_token_latency=_percentiles(recent.inter_token),
    )


def _percentiles(latencies: LogHistogram) -> pb.LatencyPercentiles:
    if not latencies.count:
        return pb.LatencyPercentiles()
    p50, p90, p99 = (to_duration(latencies.percentile(percent)) for percent in (50, 90, 99))
    return pb.LatencyPercentiles(count=latencies.count, p50=p50, p90=p90, p99=p99)
