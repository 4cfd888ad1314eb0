"""SubscribeKvEvents: a mirror that counts every store and removal equals the cache, and the load reports the running
requests."""

import asyncio
import hashlib
import random
from collections import Counter
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common, vllm_engine_pb2 as vllm
from waiting import turns, until
from wire.slow_context import SlowContext

from penstock.kv.block_hash import hash_blocks
from penstock.kv.events import KvEventLog
from penstock.kv.manager import KVCacheManager
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError, StatusError
from penstock.service.rpc.vllm import kv_feed
from penstock.service.rpc.vllm.kv_events import KvEventStreams
from penstock.service.rpc.vllm.kv_feed import KvFeed
from penstock.service.transport import call_end

KEY = "k" * 40
METADATA = (("authorization", f"Bearer {KEY}"),)


def int64(block_hash):
    return int.from_bytes(block_hash[:8], "big", signed=True)


class Mirror:
    """Applies batches as a gateway does: numbers are consecutive, and copies of a block are counted."""

    def __init__(self, sequence=0):
        self.copies: Counter[int] = Counter()
        self.blocks = {}
        self.salts = set()
        self.sequence = sequence
        self.snapshot_chunks = 0
        self.loads = []

    def apply(self, batch):
        self.loads.append(batch.load)
        assert batch.load.sample == len(self.loads)
        if batch.load.load_only:
            assert not batch.events
            assert batch.sequence_number == self.sequence
            return
        assert not self.sequence or batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        self.snapshot_chunks += batch.HasField("snapshot")
        for event in batch.events:
            if event.HasField("cleared"):
                self.copies.clear()
                self.blocks.clear()
            for block_hash in event.removed.block_hashes:
                self.copies[block_hash] -= 1
            self._store(event.stored)
        assert set(self.copies.values()) <= {0, 1}, "each store and each removal is sent once"

    def _store(self, stored):
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        assert parent is None or self.copies[parent], "a gateway ignores a block that follows no known one"
        for block in stored.blocks:
            self.copies[block.block_hash] += 1
            self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
            self.salts.add(stored.cache_salt)
            assert block.block_size == len(block.token_ids)
            parent = block.block_hash

    def equals(self, log):
        """Whether it has the log's blocks, with their tokens and parents."""
        expected = {}
        for block_hash in log.hashes:
            block = log.find(block_hash)
            parent = int64(block.parent_hash) if block.parent_hash else None
            expected[int64(block_hash)] = (parent, block.token_ids)
        return {key: self.blocks[key] for key, count in self.copies.items() if count} == expected


def subscribe(engine, start=0, metadata=()):
    request = common.SubscribeKvEventsRequest(start_sequence_number=start, load_records_before_first_batch=True)
    return engine.stub.SubscribeKvEvents(request, metadata=metadata)


async def follow(call, mirror, enough):
    while not enough():
        batch = await call.read()
        assert batch is not grpc.aio.EOF
        mirror.apply(batch)


async def churn(engine, rng, number):
    prompts = [[rng.randrange(256) for _ in range(rng.choice((20, 40, 100)))] for _ in range(3)]
    for _ in range(number):
        await engine.output(rng.choice(prompts), max_tokens=rng.choice((1, 20)))


async def test_a_mirror_equals_the_cache_through_evictions_a_flush_and_a_new_worker(start_engine):
    executor = FakeExecutor(vocab_size=258, num_blocks=24, next_token=lambda history, sampling: len(history) % 256)
    engine = await start_engine(executor)
    log, rng, mirror = engine.service.engine.kv_events, random.Random(3), Mirror()
    await churn(engine, rng, 5)
    call = subscribe(engine)
    await call.initial_metadata()
    await follow(call, mirror, lambda: mirror.snapshot_chunks)
    assert mirror.equals(log)
    for disturb in (None, engine.service.engine.flush_cache, executor.die, None):
        if disturb is not None:
            disturb()
            await until(lambda: engine.service.engine.state.name == "SERVING")
        await churn(engine, rng, 10)
        await follow(call, mirror, lambda: mirror.equals(log))
    assert mirror.salts == {""}, "callers without credentials need no salt"


async def test_a_subscriber_resumes_by_number_and_else_begins_again(start_engine):
    engine = await start_engine()
    log, rng, mirror = engine.service.engine.kv_events, random.Random(4), Mirror()
    await churn(engine, rng, 3)
    call = subscribe(engine)
    await follow(call, mirror, lambda: mirror.snapshot_chunks and mirror.equals(log))
    call.cancel()
    await churn(engine, rng, 3)
    mirror.loads.clear()
    call = subscribe(engine, mirror.sequence)
    await follow(call, mirror, lambda: mirror.equals(log))
    assert mirror.snapshot_chunks == 1
    for unknown in (mirror.sequence + 10, 1, mirror.sequence - 10**6):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await subscribe(engine, unknown).read()
        assert error.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert (error.value.details() or "").startswith("start_sequence_number: ")


async def test_streams_end_when_batches_can_no_longer_be_made(start_engine, monkeypatch):
    engine = await start_engine()
    call = subscribe(engine)
    await call.initial_metadata()
    mirror = Mirror()
    await follow(call, mirror, lambda: mirror.snapshot_chunks)
    monkeypatch.setattr(KvFeed, "advance", lambda feed: 1 / 0)
    await churn(engine, random.Random(6), 1)
    for each in (call, subscribe(engine), subscribe(engine, mirror.sequence)):
        assert await each.code() is grpc.StatusCode.INTERNAL


async def test_blocks_of_a_tenant_have_its_salt(start_engine, tmp_path, load_keys):
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} acme admin\n")
    engine = await start_engine(metadata=METADATA, authenticator=load_keys(path))
    await engine.output([*range(64)], max_tokens=1)
    mirror = Mirror()
    await follow(subscribe(engine, metadata=METADATA), mirror, lambda: mirror.equals(engine.service.engine.kv_events))
    assert mirror.salts == {"acme"}


async def test_the_load_says_what_runs_what_waits_and_how_long_nothing_came(start_engine):
    executor = FakeExecutor(vocab_size=258, num_blocks=8, seconds_per_step=3600, max_num_seqs=2)
    engine = await start_engine(executor)
    mirror = Mirror()
    call = subscribe(engine)
    await follow(call, mirror, lambda: mirror.loads)
    idle = mirror.loads[0]
    assert (idle.running_requests, idle.waiting_requests, idle.max_running_requests) == (0, 0, 2)
    assert not idle.HasField("engine_silence_ms"), "nothing is in flight"
    assert idle.engine_reports_steps
    assert idle.max_total_num_tokens == 8 * 16, "the first one has all numbers"
    calls = [engine.generate([*range(start, start + 40)], max_tokens=8) for start in (0, 50, 100)]
    await follow(call, mirror, lambda: mirror.loads[-1].running_requests + mirror.loads[-1].waiting_requests == 3)
    await follow(call, mirror, lambda: mirror.loads[-1].engine_silence_ms > 100)
    load = mirror.loads[-1]
    running, waiting = load.running_requests, load.waiting_requests
    assert load.load_only
    assert waiting in (1, 2), "a step has begun, perhaps before the others arrived"
    assert load.waiting_uncached_tokens == 40 * waiting
    assert load.active_token_usage == load.token_usage == 3 * running / 8
    polled = (await engine.stub.GetLoads(vllm.GetLoadsRequest())).loads[0]
    assert (polled.num_running_reqs, polled.num_waiting_reqs) == (running, waiting)
    assert polled.num_waiting_uncached_tokens == 40 * waiting
    for each in calls:
        each.cancel()
    await follow(call, mirror, lambda: not mirror.loads[-1].running_requests)
    assert mirror.loads[-1].token_usage == 0, "cached blocks can be evicted"


class NoLoad:
    """A load that never changes."""

    def core(self):
        return common.EngineLoad()

    def add_telemetry(self, load):
        pass


def hash_of(number):
    return hashlib.sha256(str(number).encode()).digest()


def store(log, number):
    log.stored(hash_of(number), b"", (number, number + 1))


async def test_a_reader_that_stalls_holds_up_nobody_and_ends(monkeypatch):
    monkeypatch.setattr(call_end, "WRITE_PATIENCE_S", 0.3)
    log = KvEventLog(2, 10_000)
    load: Any = NoLoad()
    events = KvEventStreams(log, load)
    slow: Any = SlowContext()
    fast: Any = SlowContext()
    for _ in range(10_000):
        fast.room.release()
    tasks = [asyncio.create_task(events.subscribe(common.SubscribeKvEventsRequest(), each)) for each in (slow, fast)]
    mirror = Mirror()
    for number in range(2000):
        store(log, number)
        await turns(1)
    while not mirror.equals(log):
        await turns(1)
        for message in fast.messages:
            mirror.apply(common.KvEventBatch.FromString(message))
        fast.messages.clear()
    with pytest.raises(ServiceError, match="not read as fast"):
        await tasks[0]
    assert not slow.messages
    events.close()
    with pytest.raises(ServiceError, match="shutting down"):
        await tasks[1]


async def test_a_subscriber_that_is_too_far_behind_begins_again(monkeypatch):
    monkeypatch.setattr(kv_feed, "MAX_HISTORY_BYTES", 2000)
    log = KvEventLog(2, 10_000)
    load: Any = NoLoad()
    slow: Any = SlowContext()
    events = KvEventStreams(log, load)
    task = asyncio.create_task(events.subscribe(common.SubscribeKvEventsRequest(), slow))
    slow.room.release()
    await until(lambda: slow.messages)
    for number in range(300):
        store(log, number)
        await asyncio.sleep(0.001)
    for _ in range(1000):
        slow.room.release()
    with pytest.raises(StatusError, match="read too slowly") as error:
        await task
    assert error.value.status.code == grpc.StatusCode.DATA_LOSS.value[0]


def test_what_is_stored_and_removed_between_batches_never_was():
    log = KvEventLog(2, 100)
    feed = KvFeed(log)
    first = feed.sequence
    store(log, 1)
    log.removed(hash_of(1))
    feed.advance()
    assert feed.is_up_to_date
    assert feed.sequence == first, "there were no changes"
    store(log, 2)
    feed.advance()
    log.removed(hash_of(2))
    store(log, 2)
    feed.advance()
    assert feed.sequence == first + 1
    assert feed.can_resume(first)
    list(feed.snapshot())
    assert not feed.can_resume(first), "it may be the number of a snapshot's chunk"
    assert feed.can_resume(first + 1)


def apply(mirror, batches):
    for raw in batches:
        batch = common.KvEventBatch.FromString(raw)
        batch.load.sample = len(mirror.loads) + 1
        mirror.apply(batch)


def test_a_block_that_is_computed_again_precedes_those_that_follow_it():
    kv = KVCacheManager(6, 4)
    prompt = [*range(12)]
    hashes = hash_blocks(prompt, 4, b"")

    def start(num_tokens):
        cached = kv.find_prefix(hashes[: num_tokens // 4], num_tokens)
        table = kv.allocate(cached, num_tokens)
        assert table is not None
        kv.publish(table, hashes, len(cached), num_tokens // 4, prompt)
        return table

    kv.pool.release(start(8))
    running = start(8)  # its second block is a copy, since the last token is computed in any case
    running += kv.allocate([], 4) or []
    kv.publish(running, hashes, 2, 3, prompt)
    pressure = kv.allocate([], 12) or []
    assert hashes[1] not in kv.events.hashes
    kv.pool.release(pressure)
    start(8)
    assert list(kv.events.hashes) == [hashes[0], hashes[2], hashes[1]]
    mirror = Mirror()
    apply(mirror, KvFeed(kv.events).snapshot())
    assert mirror.equals(kv.events)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_that_come_back_while_their_removal_waits_keep_their_order(order):
    log = KvEventLog(2, 10_000)
    feed = KvFeed(log)
    first = feed.sequence
    for number in range(10, 1010):
        store(log, number)
    for number in order:
        log.stored(hash_of(number), hash_of(0) if number else b"", (1, 2))
        log.removed(hash_of(number))
    feed.advance()
    assert not feed.is_up_to_date
    store(log, 0)
    log.stored(hash_of(1), hash_of(0), (1, 2))
    while not feed.is_up_to_date:
        feed.advance()
    mirror = Mirror(first)
    apply(mirror, feed.after(first) or [])
    assert mirror.equals(log)


def test_a_large_snapshot_comes_in_chunks_that_end_at_its_number():
    log = KvEventLog(16, 10_000)
    for number in range(2000):
        log.stored(hash_of(number), hash_of(number - 1) if number else b"", range(16))
    feed, mirror = KvFeed(log), Mirror()
    raw_chunks = list(feed.snapshot())
    chunks = [common.KvEventBatch.FromString(raw) for raw in raw_chunks]
    assert len(chunks) > 5
    for index, chunk in enumerate(chunks):
        assert (chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) == (index, len(chunks), 2000)
        assert chunk.ByteSize() < 40_000
    apply(mirror, raw_chunks)
    assert mirror.sequence == feed.sequence
    assert mirror.equals(log)
