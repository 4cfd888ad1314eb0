"""The probes on the metrics listener, for supervisors that speak plain HTTP: /livez and /readyz."""

import asyncio
import concurrent.futures
import threading
import urllib.error

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from waiting import until
from wire.http_get import fetch

from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.telemetry import collector


def probe(target: str, path: str) -> tuple[int, str]:
    """Returns status and body."""
    try:
        return 200, fetch(target, path=path)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def probes(target: str) -> list[tuple[int, str]]:
    return [await asyncio.to_thread(probe, target, path) for path in ("/livez", "/readyz")]


async def test_a_service_is_alive_before_it_is_ready(byte_tokenizer):
    """The listener opens before the model is loaded; the state is the only metric until then."""
    may_load = threading.Event()

    def load():
        may_load.wait(120)
        return byte_tokenizer

    config = ServerConfig("bytes", "127.0.0.1:0", metrics_listen="127.0.0.1:0")
    server = Server(config, Engine(FakeExecutor(vocab_size=258)), load)
    starting = asyncio.create_task(server.start())
    try:
        await until(lambda: server.metrics_target is not None)
        target = server.metrics_target
        assert target is not None
        assert await probes(target) == [(200, "starting\n"), (503, "starting\n")]
        page = await asyncio.to_thread(fetch, target)
        own = {family.name: family for family in parse_text(page) if not family.name.startswith("process_")}
        assert list(own) == ["penstock_state"]
        states = {sample.labels["state"] for sample in own["penstock_state"].samples if sample.value == 1}
        assert states == {"starting"}
    finally:
        may_load.set()
        await starting
    assert await probes(target) == [(200, "serving\n"), (200, "serving\n")]
    assert "penstock_steps_total" in await asyncio.to_thread(fetch, target)
    await server.stop()
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch, target)


async def test_a_service_that_drains_or_stops_is_alive_and_not_ready(metered):
    target = metered.server.metrics_target
    metered.engine.drain()
    assert await probes(target) == [(200, "draining\n"), (503, "draining\n")]
    metered.engine.resume()
    assert await probes(target) == [(200, "serving\n")] * 2
    metered.server.request_stop()
    assert await probes(target) == [(200, "stopping\n"), (503, "stopping\n")]


async def test_a_service_whose_event_loop_hangs_is_not_alive(metered, monkeypatch):
    monkeypatch.setattr(collector, "READ_S", 0.05)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for path in ("/livez", "/readyz"):
            probed = pool.submit(probe, metered.server.metrics_target, path)
            # Meanwhile the loop does nothing else.
            assert probed.result(timeout=120) == (503, "the event loop does not respond\n")
