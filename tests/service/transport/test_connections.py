"""Connections: which of them give way to new ones, and how many there may be."""

import asyncio
import errno
import os
import resource
import threading
from contextlib import AsyncExitStack, closing, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import until
from wire.raw_http2 import raw_client

import penstock.v1 as pb
from penstock.service.auth.identity import BearerAuthenticator, Principal
from penstock.service.config.addresses import Address
from penstock.service.transport import connections
from penstock.service.transport.connections import ClientConnection, Connections, max_connections, peer_of

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
    found.begin_call(names["watching"], None)
    found.begin_call(names["idle"], "a")
    found.end_call(names["idle"], "a")
    found.begin_call(names["busy"], "a")
    peers = [peer for what in ("busy", "idle", "watching", "silent") if (peer := peer_of(names[what])) is not None]
    assert found.giving_way(peers, 6) == ()
    leaving = [found.giving_way(peers, limit) for limit in (5, 4, 1)]
    assert leaving == [
        [peer_of(names["silent"])],
        [peer_of(names[what]) for what in ("silent", "watching")],
        [peer_of(names[what]) for what in ("silent", "watching", "idle")],
    ]


async def test_the_tenant_with_the_most_busy_connections_loses_its_newest():
    """Where no idle one is left, and only as many as leave room."""
    found = Connections()
    peers = []
    for port, tenant in enumerate("baaaaaaaac", 1):
        name = f"ipv4:10.0.0.1:{port}"
        found.begin_call(name, tenant)
        peers.append(("10.0.0.1", port))
    assert found.giving_way(peers, 14) == ()
    assert found.giving_way(peers, 12) == [peers[8]]
    assert found.giving_way(peers, 8) == [peers[number] for number in (8, 7, 6, 5)]


async def test_connections_are_listed_only_where_a_port_may_be_full():
    """The few places of the administration are no reason as long as no files are new."""
    found = Connections()
    found.add_listener(Address.parse("127.0.0.1:1"), 4096)
    found.add_listener(Address.parse("127.0.0.1:2"), 64)
    assert found.may_be_full(49)
    found._num_files, found._num_connected = 2000, {1: 1900, 2: 8}
    assert not found.may_be_full(2040)
    assert found.may_be_full(2041)


async def test_all_clients_to_be_cut_are_cut_together(monkeypatch):
    """However many ask for it meanwhile: to find one takes a look at all files."""
    found, cuts = Connections(), []
    monkeypatch.setattr(connections, "_shut_down", lambda ports, peers: cuts.append(len(peers)))
    for port in range(1, 101):
        found.cut(f"ipv4:10.0.0.1:{port}")
    await until(lambda: sum(cuts) == 100)
    assert len(cuts) <= 2


def test_when_no_file_can_be_opened_there_are_many(monkeypatch):
    def fail(path):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    assert connections._num_files() == 1000


def test_the_newest_silent_connection_gives_way_last():
    """Its file may have the smallest number: that of a connection that was closed."""
    found = Connections()
    old, new = (
        [ClientConnection(("10.0.0.1", number), number) for number in (2, 3, 4)],
        ClientConnection(("10.0.0.1", 1), 1),
    )
    assert found.by_age({80: old}, 1.0) == {80: [peer for peer, _ in old]}
    peers = found.by_age({80: [new, *old]}, 2.0)[80]
    assert found.giving_way(peers, 5) == [old[0].peer]
    assert peers[-1] == new.peer


async def test_connections_are_found_when_no_file_can_be_opened(start_service):
    service = await start_service()
    found = service.server._running._limits.connections
    async with raw_client(service.target) as client:
        await client.accepted()
        name = "ipv4:{}:{}".format(*client._writer.get_extra_info("sockname"))
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        files = []
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        try:
            with suppress(OSError):
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            found.cut(name)
            await client.closed()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for file in files:
                os.close(file)


async def test_a_listing_that_ends_after_its_service_leaves_no_file_and_closes_no_other(monkeypatch):
    """The thread that lists connections is between two instructions when the event loop stops."""
    found = Connections()
    found.add_listener(Address(host="127.0.0.1", port=1), 8)
    is_closing, may_go_on = threading.Event(), threading.Event()
    spare, closed = [], []

    def open_file(*arguments, real=os.open):
        spare.append(real(*arguments))
        return spare[-1]

    def close_file(descriptor, real=os.close):
        real(descriptor)
        if descriptor in spare:
            closed.append(descriptor)
            is_closing.set()
            may_go_on.wait()

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "close", close_file)
    found.start()
    listing = asyncio.create_task(found.unfinished_bytes())
    await until(is_closing.is_set)
    try:
        found.stop()
    finally:
        may_go_on.set()
    assert await listing == {}
    assert closed == spare
    assert len(spare) == 1


async def test_clients_are_forgotten_where_files_cannot_be_listed(monkeypatch):
    monkeypatch.setattr(connections, "_FILES", "/no/such/folder")
    found = Connections()
    found.begin_call("ipv4:10.0.0.1:1", "a")
    found.end_call("ipv4:10.0.0.1:1", "a")
    assert not found._uses


@pytest.mark.parametrize(("limit", "number"), [(160, 28), (10_000, 4096), (100, 1), (resource.RLIM_INFINITY, 4096)])
def test_files_are_left_for_a_new_worker(limit, number, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(connections, "_num_files", lambda: 20)
    assert max_connections(4096) == number


async def test_silent_connections_leave_room_for_callers(start_service, monkeypatch):
    """They take all there are, and come again as often as they are closed."""

    class Keys:
        def principal_of(self, credential):
            return Principal("one")

    monkeypatch.setattr(connections, "CHECK_S", 0.02)
    service = await start_service(max_connections=8, authenticator=BearerAuthenticator([Keys]))
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
            pb.GetModelRequest.SerializeToString,
            pb.GetModelResponse.FromString,
        )

        async def answered() -> bool:
            answer = await get_model(
                pb.GetModelRequest(), metadata=[("authorization", "Bearer key")], wait_for_ready=True
            )
            return bool(answer.model.name)

        async def answered_at_last() -> bool:
            """Until the first call arrives, the connection is as silent as the others and may be closed."""
            with suppress(grpc.aio.AioRpcError):
                return await answered()
            return False

        while not await answered_at_last():
            pass
        for _ in range(5):
            assert await answered()
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
