"""The load that a gateway reads now and then."""

import time

from waiting import until

from penstock.scheduler.loop.live_requests import LiveRequestFilter
from penstock.service.rpc.vllm.load import LoadReader
from penstock.service.telemetry.metrics import Metrics
from penstock.service.telemetry.recent_stats import RecentStats


async def test_idle_time_that_nobody_read_is_no_silence(start_engine, monkeypatch):
    started = await start_engine()
    engine, now = started.service.engine, time.monotonic()
    reader = LoadReader(engine, engine.facts, RecentStats(lambda: engine.counters, Metrics()), clock=lambda: now)
    assert not reader.core().HasField("engine_silence_ms")
    monkeypatch.setattr(engine, "_pump_soon", lambda: None)  # no step begins
    call = started.generate([*range(20)])
    await until(lambda: engine.stats().waiting)
    [request] = engine.scan(LiveRequestFilter()).read(1)
    request.request.arrival = now + 599
    now += 600
    assert reader.core().engine_silence_ms == 1000
    call.cancel()
