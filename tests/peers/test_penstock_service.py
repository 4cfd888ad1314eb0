"""The runner of ours: what it makes of the service's statistics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cpu_bench.runners import penstock_service

import penstock.v1 as pb
from penstock.clients.cli.as_dict import duration_of
from penstock.clients.errors import PenstockError
from penstock.v1 import admin_pb2_grpc


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Tells what a test has put into it, then hangs."""

    def __init__(self, *p99_us: int) -> None:
        self._p99_us = p99_us
        self.interval_ms = 0

    async def WatchStats(self, request: pb.WatchStatsRequest, context: Any) -> AsyncIterator[pb.WatchStatsResponse]:
        self.interval_ms = request.interval.ToMilliseconds()
        async for stats in answers(*self._p99_us):
            yield stats
        await asyncio.Event().wait()


async def answers(*p99_us: int) -> AsyncIterator[pb.WatchStatsResponse]:
    """One with each lag."""
    for lag_us in p99_us:
        yield pb.WatchStatsResponse(loop_lag=pb.LoopLag(p99=duration_of(lag_us / 1e6), max=duration_of(0.1)))


@asynccontextmanager
async def serving(admin: FakeAdmin, folder: Path) -> AsyncIterator[str]:
    """Where it answers."""
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    target = f"unix:{folder}/admin"
    server.add_insecure_port(target)
    await server.start()
    try:
        async with asyncio.timeout(20):
            yield target
    finally:
        await server.stop(None)


async def test_the_worst_interval_counts() -> None:
    figures: dict[str, float] = {}
    await penstock_service._keep_worst(answers(3000, 8500, 2000), figures)
    assert figures == {"loop_lag_p99_ms": 8.5}


async def test_the_time_before_the_run_does_not_count(tmp_path: Path) -> None:
    admin = FakeAdmin(90_000, 8500)  # type: ignore[abstract]
    async with serving(admin, tmp_path) as target, penstock_service.loop_lag(target) as figures:
        while not figures:  # noqa: ASYNC110 - nothing tells of an answer
            await asyncio.sleep(0.005)
    assert figures == {"loop_lag_p99_ms": 8.5}
    assert admin.interval_ms == 2000


async def test_a_run_that_is_too_short_has_no_figure(tmp_path: Path) -> None:
    admin = FakeAdmin(90_000)  # type: ignore[abstract]
    async with serving(admin, tmp_path) as target, penstock_service.loop_lag(target) as figures:
        pass
    assert figures == {}


async def test_a_service_that_cannot_be_watched_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="no service answers"):
        async with penstock_service.loop_lag(f"unix:{tmp_path}/nowhere"):
            pass
