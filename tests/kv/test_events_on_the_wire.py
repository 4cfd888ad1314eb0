"""Mirrors built by WatchKvEvents, from a real server, while the cache is never still."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import grpc
from waiting import until

import penstock.v1 as pb
from penstock.kv.events import KvEventLog
from penstock.service.admin.kv_events import KvEvents
from penstock.v1 import admin_pb2_grpc as pb_grpc


@asynccontextmanager
async def serving(log):
    """A stub of a service that has this one method."""
    methods = KvEvents(log)

    class Service(pb_grpc.AdminServiceServicer):
        async def WatchKvEvents(self, request, context):  # type: ignore[override]
            await methods.WatchKvEvents(request, context)

    server = grpc.aio.server()
    pb_grpc.add_AdminServiceServicer_to_server(Service(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.AdminServiceStub(channel)
    await server.stop(None)


def apply(mirror, message):
    stored = [(block.hash, block.parent_hash, tuple(block.token_ids)) for block in message.stored]
    mirror.apply(message.sequence, message.cleared, message.removed_hashes, stored)


async def watch(stub, mirror, rng, num_messages, away_s):
    """Reads until it is cancelled, and reconnects every so many messages."""
    stream_id = ""
    while True:
        call = stub.WatchKvEvents(pb.WatchKvEventsRequest(after_sequence=mirror.sequence, stream_id=stream_id))
        for _ in range(rng.randint(1, num_messages)):
            message = await call.read()
            assert message.ByteSize() <= 64 << 10
            assert message.block_size == 4
            stream_id = message.stream_id
            apply(mirror, message)
        call.cancel()
        await asyncio.sleep(away_s)


async def test_mirrors_on_the_wire_equal_the_pools_map_after_10000_random_operations(
    random_cache_type, mirror_type, monkeypatch
):
    # Or a message would hold the whole pool.
    monkeypatch.setattr("penstock.service.kv_publisher.watchers.MAX_MESSAGE_BYTES", 400)
    cache = random_cache_type(seed=7)
    rng = random.Random(7)
    async with serving(cache.kv.events) as stub:
        # One stays, one is cut off all the time, in the midst of a snapshot too, and one is away until it is behind.
        habits = ((10**9, 0.0), (20, 0.0), (30, 0.5))
        mirrors = [mirror_type() for _ in habits]
        watching = [
            asyncio.create_task(watch(stub, mirror, rng, *habit)) for mirror, habit in zip(mirrors, habits, strict=True)
        ]
        for number in range(10_000):
            cache.operate()
            if number % 20 == 0:
                await asyncio.sleep(0.001)
        await until(lambda: all(mirror.map == cache.map for mirror in mirrors) or any(task.done() for task in watching))
        assert not any(task.done() for task in watching), "a watcher failed"
        for task in watching:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    assert mirrors[1].num_cleared < 200, "it began anew each time instead of going on"
    assert cache.kv.events.sequence > 4000


async def test_the_first_message_comes_at_once_and_the_next_when_something_happens(random_cache_type):
    cache = random_cache_type(seed=1)
    async with serving(cache.kv.events) as stub:
        call = stub.WatchKvEvents(pb.WatchKvEventsRequest())
        await call.initial_metadata()
        first = await call.read()
        assert (first.cleared, first.sequence) == (True, cache.kv.events.sequence)
        next_message = asyncio.create_task(call.read())
        await asyncio.sleep(0.05)
        assert not next_message.done()
        while not cache.map:
            cache.operate()
        message = await next_message
        assert [block.hash for block in message.stored] == list(cache.map)
        call.cancel()


async def test_a_slow_reader_gets_the_final_state_without_every_change(mirror_type, monkeypatch):
    """The service waits once the connection takes no more, and keeps nothing for it."""
    monkeypatch.setattr("penstock.service.kv_publisher.watchers.PAUSE_S", 0.0)
    log = KvEventLog(block_size=4096, max_changes=100)
    hashes = [bytes([number]) for number in range(8)]
    mirror = mirror_type()
    async with serving(log) as stub:
        call = stub.WatchKvEvents(pb.WatchKvEventsRequest())
        apply(mirror, await call.read())
        for number in range(1500):
            token_ids = (1 << 28,) * 4095 + (number,)  # 20 KB on the wire
            block_hash = hashes[number % len(hashes)]
            if number >= len(hashes):
                log.removed(block_hash)
            log.stored(block_hash, b"", token_ids)
            await asyncio.sleep(0.0005)
        num_read = 0
        async with asyncio.timeout(120):
            while mirror.sequence != log.sequence:
                apply(mirror, await call.read())
                num_read += 1
        call.cancel()
    assert {block_hash: ids[-1] for block_hash, (_, ids) in mirror.map.items()} == {
        hashes[number % len(hashes)]: number for number in range(1492, 1500)
    }
    assert mirror.num_cleared > 1, "it never fell behind"
    assert num_read < 1500


async def test_many_watch_and_none_is_left_behind(random_cache_type, mirror_type):
    cache = random_cache_type(seed=5)
    mirrors = [mirror_type() for _ in range(20)]
    async with serving(cache.kv.events) as stub:
        watching = [asyncio.create_task(watch(stub, mirror, random.Random(1), 10**9, 0.0)) for mirror in mirrors]
        for number in range(2000):
            cache.operate()
            if number % 50 == 0:
                await asyncio.sleep(0.002)
        await until(lambda: all(mirror.map == cache.map for mirror in mirrors))
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    await until(lambda: not cache.kv.events._wakes)  # whoever left is not woken any more
