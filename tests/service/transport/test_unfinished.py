"""Later messages of streams: where too many bytes of them are unfinished, streams of the guilty connections end."""

import asyncio
import struct
from contextlib import AsyncExitStack

import pytest
from waiting import until
from wire.raw_http2 import raw_client

import penstock.v1 as pb
from penstock.service.auth.identity import BearerAuthenticator, Principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.transport import unfinished
from penstock.service.transport.connections import ClientConnection, Connections
from penstock.service.transport.unfinished import UnfinishedMessages

GENERATE = "/penstock.v1.GenerationService/Generate"
MIB = 1 << 20
IDLE, GUILTY = ClientConnection(("10.0.0.1", 1), 1), ClientConnection(("10.0.0.2", 2), 2)
EXHAUSTED = "8"


@pytest.fixture
def streams(monkeypatch):
    """Of both connections, three each, that have been quiet for long enough."""
    monkeypatch.setattr(unfinished, "QUIET_S", 0.0)
    found = UnfinishedMessages(Connections())

    async def wait(connection):
        async with found.read("ipv4:{}:{}".format(*connection.peer)):
            await asyncio.Event().wait()

    return found, wait


async def begin(wait, *connections):
    tasks = [asyncio.create_task(wait(connection)) for connection in connections]
    await asyncio.sleep(0)
    return tasks


async def test_the_oldest_streams_of_the_guilty_connection_end(streams):
    """As many as hold what is too much, and no idle one of another connection."""
    found, wait = streams
    idle = await begin(wait, *[IDLE] * 3)
    guilty = await begin(wait, *[GUILTY] * 3)
    found.check({IDLE: 2 * MIB, GUILTY: 256 * MIB + 9 * MIB})
    await asyncio.sleep(0.01)
    assert [task.done() for task in guilty] == [True, True, False]
    assert not any(task.done() for task in idle)
    for task in guilty[:2]:
        with pytest.raises(ServiceError) as error:
            await task
        assert error.value.reason is Reason.MESSAGES_IN_FLIGHT


async def test_nothing_ends_within_the_budget(streams):
    found, wait = streams
    tasks = await begin(wait, IDLE, GUILTY)
    found.check({IDLE: 0, GUILTY: 256 * MIB})
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)


async def test_what_a_stream_held_that_ended_counts_no_more(streams):
    found, wait = streams
    (first,) = await begin(wait, GUILTY)
    found.check({GUILTY: 257 * MIB})
    (second,) = await begin(wait, GUILTY)
    found.check({GUILTY: 257 * MIB})
    await asyncio.sleep(0.01)
    assert first.done()
    assert not second.done()


async def test_a_stream_with_a_recent_message_stays(streams, monkeypatch):
    monkeypatch.setattr(unfinished, "QUIET_S", 3600.0)
    found, wait = streams
    (task,) = await begin(wait, GUILTY)
    found.check({GUILTY: 300 * MIB})
    await asyncio.sleep(0.01)
    assert not task.done()


async def test_unfinished_messages_end_and_idle_streams_go_on(start_service, monkeypatch):
    """However many messages the idle ones have had before."""

    class Keys:
        def principal_of(self, credential):
            return Principal("one")

    for name, value in (("CHECK_S", 0.05), ("QUIET_S", 0.1), ("MAX_UNFINISHED_BYTES", 2 * MIB)):
        monkeypatch.setattr(unfinished, name, value)
    service = await start_service(authenticator=BearerAuthenticator([Keys]))
    limits = service.server._running._limits
    async with AsyncExitStack() as stack:
        idle, guilty = [await stack.enter_async_context(raw_client(service.target)) for _ in range(2)]

        async def begin(client, text):
            stream = client.begin(GENERATE, {"authorization": "Bearer key"})
            start = pb.GenerationStart(ref=1, text=text, sampling=pb.SamplingParams(max_tokens=1))
            raw = pb.GenerateRequest(start=start).SerializeToString()
            await client.put(stream, struct.pack(">BI", 0, len(raw)) + raw)
            return stream

        idle_streams = [await begin(idle, "a" * MIB) for _ in range(4)]
        guilty_streams = [await begin(guilty, "hi") for _ in range(4)]
        await until(lambda: limits.unfinished.reads.num_taken == 8)
        assert sum((await limits.connections.unfinished_bytes()).values()) < MIB // 16
        for stream in guilty_streams:
            await guilty.put(stream, struct.pack(">BI", 0, 8 * MIB) + bytes(MIB))
        await asyncio.sleep(0.5)
        assert not guilty.ended  # as long as the process is small
        monkeypatch.setattr(unfinished, "process_bytes", lambda: 1 << 40)
        assert await guilty.end(guilty_streams[0]) == EXHAUSTED
        assert b"unfinished messages" in guilty.details[guilty_streams[0]]
        assert not set(idle_streams) & set(idle.ended)


async def test_bytes_of_an_earlier_connection_of_the_same_name_do_not_count(monkeypatch):
    found = Connections()
    received = {ClientConnection(("10.0.0.1", 1), 7): 5000}
    monkeypatch.setattr("penstock.service.transport.connections._received", lambda ports: received)
    found.begin_call("ipv4:10.0.0.1:1", "one")
    found.count("ipv4:10.0.0.1:1", 4_000_000)
    assert sum((await found.unfinished_bytes()).values()) == 0
    received = {ClientConnection(("10.0.0.1", 1), 8): 5000}
    assert sum((await found.unfinished_bytes()).values()) == 5000
