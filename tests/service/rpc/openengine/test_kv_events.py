"""SubscribeKvEvents: an index that equals the prefix cache, through gaps, snapshots and subscribers that misbehave."""

import asyncio
import hashlib
import random
from typing import Any

import grpc
import pytest
from waiting import turns, until
from wire.slow_context import SlowContext

from penstock.kv.events import KvEventLog
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError
from penstock.service.transport import call_end

pytest.importorskip("openengine.v1", reason="the bindings of OpenEngine are not installed (docs/openengine.md)")
from openengine.v1 import error_pb2, generation_pb2, kv_pb2 as oe

from penstock.service.rpc.openengine.kv_events import KvSubscriptions


class Index:
    """A router's index of one service."""

    def __init__(self):
        self.blocks = {}
        """The parent and the tokens of each block, by its hash."""
        self.next = 0
        """The first number that the index lacks."""
        self.num_cleared = 0
        self.salts = set()

    def apply(self, response):
        assert response.WhichOneof("event") == "batch"
        batch = response.batch
        assert batch.events
        assert batch.sequence_number >= self.next - 1, "numbers never fall"
        self.next = batch.sequence_number + 1
        for event in batch.events:
            match event.WhichOneof("event"):
                case "all_blocks_cleared":
                    self.blocks.clear()
                    self.num_cleared += 1
                case "block_removed":
                    for block_hash in event.block_removed.block_hashes:
                        self.blocks.pop(block_hash.value, None)
                case "block_stored":
                    self._store(event.block_stored)

    def _store(self, stored):
        assert stored.medium == oe.STORAGE_MEDIUM_GPU
        size, parent = stored.block_size, stored.parent_block_hash.value
        assert len(stored.token_ids) == size * len(stored.block_hashes)
        if stored.extra_keys:
            assert not parent
            assert [len(keys.values) for keys in stored.extra_keys] == [1] + [0] * (len(stored.block_hashes) - 1)
            self.salts.update(stored.extra_keys[0].values)
        for at, block_hash in enumerate(stored.block_hashes):
            assert block_hash.encoding == "bytes"
            self.blocks[block_hash.value] = parent, tuple(stored.token_ids[at * size : (at + 1) * size])
            parent = block_hash.value

    def equals(self, log):
        found = (log.find(block_hash) for block_hash in log.hashes)
        return self.blocks == {block.block_hash: (block.parent_hash, block.token_ids) for block in found}


def subscribe(engine, start=0, metadata=(), *, snapshot=True):
    request = oe.SubscribeKvEventsRequest(include_snapshot=snapshot, start_sequence_number=start)
    return engine.control.SubscribeKvEvents(request, metadata=metadata)


async def follow(call, index, enough):
    while not enough():
        response = await call.read()
        assert response is not grpc.aio.EOF
        index.apply(response)


async def churn(engine, rng, number):
    prompts = [[rng.randrange(256) for _ in range(rng.choice((20, 40, 100)))] for _ in range(3)]
    for _ in range(number):
        stopping = generation_pb2.StoppingOptions(max_tokens=rng.choice((1, 20)))
        await engine.output(rng.choice(prompts), stopping=stopping)


async def test_an_index_equals_the_cache_through_evictions_a_flush_and_a_new_worker(start_engine):
    executor = FakeExecutor(vocab_size=258, num_blocks=24, next_token=lambda history, sampling: len(history) % 256)
    engine = await start_engine(executor)
    log, rng, index = engine.service.engine.kv_events, random.Random(3), Index()
    await churn(engine, rng, 5)
    call = subscribe(engine)
    await follow(call, index, lambda: index.equals(log))
    assert index.num_cleared == 1
    for disturb in (None, engine.service.engine.flush_cache, executor.die, None):
        if disturb is not None:
            disturb()
            await until(lambda: engine.service.engine.state.name == "SERVING")
        await churn(engine, rng, 8)
        await follow(call, index, lambda: index.equals(log))
    assert not index.salts, "callers without credentials need none"


async def test_an_index_is_rebuilt_through_a_gap(start_engine):
    engine = await start_engine()
    log, rng, index = engine.service.engine.kv_events, random.Random(4), Index()
    await churn(engine, rng, 3)
    call = subscribe(engine)
    await follow(call, index, lambda: index.equals(log))
    call.cancel()
    await churn(engine, rng, 3)
    call = subscribe(engine, index.next, snapshot=False)
    await follow(call, index, lambda: index.equals(log))
    assert index.num_cleared == 1, "it resumed"
    call.cancel()
    engine.service.engine.flush_cache()
    await churn(engine, rng, 2)
    for unknown in (index.next, index.next + 10**6, 1, 2**64 - 1):
        with pytest.raises(grpc.aio.AioRpcError, match="start_sequence_number: ") as error:
            await subscribe(engine, unknown, snapshot=False).read()
        assert error.value.code() is grpc.StatusCode.OUT_OF_RANGE
        again = Index()
        await follow(subscribe(engine, unknown), again, lambda again=again: again.equals(log))
        assert again.num_cleared == 1, "a snapshot"


async def test_without_a_snapshot_a_subscriber_gets_what_changes_from_now_on(start_engine):
    engine = await start_engine()
    log, index = engine.service.engine.kv_events, Index()
    await engine.output([*range(64)], stopping=generation_pb2.StoppingOptions(max_tokens=1))
    before = set(log.hashes)
    call = subscribe(engine, snapshot=False)
    await call.initial_metadata()
    await engine.output([*range(100, 164)], stopping=generation_pb2.StoppingOptions(max_tokens=1))
    await follow(call, index, lambda: index.blocks.keys() == set(log.hashes) - before)
    assert index.num_cleared == 0


async def test_blocks_of_a_tenant_have_its_name_as_extra_key(start_engine, keys, metadata_of):
    engine = await start_engine(metadata=metadata_of("acme"), authenticator=keys)
    await engine.output([*range(64)], stopping=generation_pb2.StoppingOptions(max_tokens=1))
    index = Index()
    call = subscribe(engine, metadata=metadata_of("operators"))
    await follow(call, index, lambda: index.equals(engine.service.engine.kv_events))
    assert index.salts == {"acme"}


async def test_other_ranks_are_refused(start_engine):
    engine = await start_engine()
    with pytest.raises(grpc.aio.AioRpcError, match="data_parallel_ranks: ") as error:
        await engine.control.SubscribeKvEvents(oe.SubscribeKvEventsRequest(data_parallel_ranks=[1])).read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_shutdown_is_the_last_event(start_engine):
    engine = await start_engine()
    index, call = Index(), subscribe(engine)
    index.apply(await call.read())
    response, _ = await asyncio.gather(call.read(), engine.service.server.stop(0))
    assert (response.error.code, response.error.retryable) == (error_pb2.ERROR_CODE_INTERNAL, True)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


def hash_of(number):
    return hashlib.sha256(str(number).encode()).digest()


async def test_a_subscriber_that_stops_reading_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(call_end, "WRITE_PATIENCE_S", 0.3)
    log = KvEventLog(2, 300)
    events = KvSubscriptions(log)
    stalled: Any = SlowContext()
    reading: Any = SlowContext()
    for _ in range(10_000):
        reading.room.release()
    request = oe.SubscribeKvEventsRequest(include_snapshot=True)
    tasks = [asyncio.create_task(events.subscribe(request, each)) for each in (stalled, reading)]
    index = Index()
    for number in range(1000):
        log.stored(hash_of(number), b"", (number, number + 1))
        await turns(1)
    while not index.equals(log):
        await asyncio.sleep(0.002)
        for message in reading.messages:
            index.apply(message)
        reading.messages.clear()
    with pytest.raises(ServiceError, match="not read as fast"):
        await tasks[0]
    assert not stalled.messages
    events.close()
    await tasks[1]
    assert reading.messages[-1].error.retryable


async def test_a_subscriber_that_falls_behind_gets_the_whole_content_again():
    log = KvEventLog(2, 300)
    events = KvSubscriptions(log)
    slow: Any = SlowContext()
    task = asyncio.create_task(events.subscribe(oe.SubscribeKvEventsRequest(include_snapshot=True), slow))
    index = Index()
    slow.room.release()
    await until(lambda: slow.messages)
    for number in range(2000):
        log.stored(hash_of(number), b"", (number, number + 1))
    for _ in range(1000):
        slow.room.release()
    while not index.equals(log):
        await asyncio.sleep(0.002)
        for message in slow.messages:
            index.apply(message)
        slow.messages.clear()
    assert index.num_cleared == 2
    events.close()
    await task
