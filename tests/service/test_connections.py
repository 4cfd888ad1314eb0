"""Connections: which of them give way to new ones, and how many there may be."""

import asyncio
import resource
from contextlib import AsyncExitStack, closing, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import raw_client
from waiting import until

from penstock.service import connections
from penstock.service.connections import Connections, max_connections, peer_of
from penstock.service.identity import Bearers, Caller
from penstock.v1 import model_pb2

NAMES = {
    "ipv4:127.0.0.1:40422": ("127.0.0.1", 40422),
    "ipv6:%5B::1%5D:40422": ("::1", 40422),
    "ipv6:[2001:db8::7]:1": ("2001:db8::7", 1),
    "unix:": None,
    "unix:/tmp/socket": None,
    "unknown": None,
    "": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_client_is_known_by_host_and_port(name):
    assert peer_of(name) == NAMES[name]


async def test_who_gives_way():
    """First those who never showed who they are, the silent before those with calls; then the idle. The rest stay."""
    found = Connections()
    names = {what: f"ipv4:10.0.0.1:{port}" for port, what in enumerate(("silent", "watching", "idle", "busy"), 1)}
    found.begin_call(names["watching"], is_known=False)
    found.begin_call(names["idle"], is_known=True)
    found.end_call(names["idle"], is_known=True)
    found.begin_call(names["busy"], is_known=True)
    peers = [peer for what in ("busy", "idle", "watching", "silent") if (peer := peer_of(names[what])) is not None]
    assert found.giving_way(peers, 6) == ()
    leaving = [found.giving_way(peers, limit) for limit in (5, 4, 1)]
    assert leaving == [
        [peer_of(names["silent"])],
        [peer_of(names[what]) for what in ("silent", "watching")],
        [peer_of(names[what]) for what in ("silent", "watching", "idle")],
    ]


@pytest.mark.parametrize(("limit", "number"), [(160, 28), (10_000, 4096), (100, 1), (resource.RLIM_INFINITY, 4096)])
def test_files_are_left_for_a_new_worker(limit, number, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(connections, "_num_files", lambda: 20)
    assert max_connections(4096) == number


async def test_silent_connections_leave_room_for_callers(start_service, monkeypatch):
    """They take all there are, and come again as often as they are closed."""

    class Keys:
        def caller_of(self, credential):
            return Caller("one")

    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    service = await start_service(max_connections=8, authenticator=Bearers([Keys]))
    host, _, port = service.target.rpartition(":")
    stop = asyncio.Event()

    async def hold():
        while not stop.is_set():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                with closing(writer):
                    await reader.read()
            await asyncio.sleep(0.05)

    holders = [asyncio.create_task(hold()) for _ in range(16)]
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(service.target, options=[("grpc.initial_reconnect_backoff_ms", 100)])
        )
        get_model = channel.unary_unary(
            "/penstock.v1.ModelService/GetModel",
            model_pb2.GetModelRequest.SerializeToString,
            model_pb2.GetModelResponse.FromString,
        )
        for _ in range(5):
            answer = await get_model(
                model_pb2.GetModelRequest(), metadata=[("authorization", "Bearer key")], wait_for_ready=True
            )
            assert answer.name
        stop.set()
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


async def test_no_more_connections_than_there_may_be(start_service):
    """Those that are in use stay, and the next one is closed at once."""
    service = await start_service(max_connections=2)
    async with raw_client(service.target) as first, raw_client(service.target) as second:
        for client in (first, second):
            client.begin("/penstock.v1.GenerationService/Generate")
        uses = service.server._running._limits.connections._uses
        await until(lambda: sum(use.num_known for use in uses.values()) == 2)
        async with raw_client(service.target) as third:
            await third.closed()
        assert not first.is_closed
        assert not second.is_closed


async def test_health_is_answered_on_a_unix_socket(start_service, tmp_path):
    """Whose clients have no names."""
    service = await start_service(listen=f"unix:{tmp_path / 'socket'}")
    answer = await health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
