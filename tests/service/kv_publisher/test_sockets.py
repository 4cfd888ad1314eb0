"""The publisher's thread: slow subscribers miss batches and get a replay at their own pace; none blocks it."""

import asyncio
import threading
from typing import Any

import pytest
import zmq
import zmq.asyncio

from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.kv_publisher import sockets
from penstock.service.kv_publisher.history import BatchHistory
from penstock.service.kv_publisher.sockets import END_NUMBER, PublisherSockets

ANY = "tcp://127.0.0.1:0"
NUM_BATCHES = 3000
BATCH = bytes(8 << 10)


@pytest.fixture
async def context():
    context = zmq.asyncio.Context()
    yield context
    context.term()


@pytest.fixture
def publish():
    """Publishes batches; the sockets are closed after the test."""
    opened = []

    def publish(**keys):
        history = BatchHistory(NUM_BATCHES, NUM_BATCHES)
        config = KvEventsConfig(enable_kv_cache_events=True, endpoint=ANY, replay_endpoint=ANY, **keys)
        opened.append(PublisherSockets(config, history))
        return opened[-1], history

    yield publish
    for each in opened:
        each.close()


async def add_batches(publisher, history, number):
    for _ in range(number):
        history.add_batch(BATCH)
    publisher.wake()
    async with asyncio.timeout(60):
        while history.num_published < history.num_batches:  # noqa: ASYNC110 - by a thread
            await asyncio.sleep(0.001)


async def read_replay(socket, first):
    """Returns the numbers of the replayed batches."""
    numbers = []
    await socket.send_multipart((b"", first.to_bytes(8, "big")))
    async with asyncio.timeout(60):
        while (frames := await socket.recv_multipart())[2] != END_NUMBER:
            assert frames[3] == BATCH
            numbers.append(int.from_bytes(frames[2], "big"))
    return numbers


async def test_a_subscriber_that_does_not_read_misses_batches_and_gets_them_again(publish, context):
    publisher, history = publish(hwm=1)
    with context.socket(zmq.SUB) as slow, context.socket(zmq.DEALER) as dealer:
        slow.setsockopt(zmq.RCVHWM, 1)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.subscribe(b"")
        slow.connect(publisher.endpoint)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(publisher.replay_endpoint)
        while not await slow.poll(1):
            await add_batches(publisher, history, 1)
        await add_batches(publisher, history, NUM_BATCHES)
        seen = set()
        while await slow.poll(50):
            seen.add(int.from_bytes((await slow.recv_multipart())[1], "big"))
        assert len(seen) < NUM_BATCHES, "it missed some"
        first = history.num_batches - NUM_BATCHES
        assert await read_replay(dealer, first) == list(range(first, history.num_batches))


async def test_a_replay_that_is_not_read_holds_up_no_other(publish, context):
    publisher, history = publish()
    await add_batches(publisher, history, NUM_BATCHES)
    with context.socket(zmq.DEALER) as stuck, context.socket(zmq.DEALER) as dealer:
        for socket in (stuck, dealer):
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.connect(publisher.replay_endpoint)
        await stuck.send_multipart((b"", bytes(8)))
        assert await read_replay(dealer, NUM_BATCHES - 5) == list(range(NUM_BATCHES - 5, NUM_BATCHES))
        await add_batches(publisher, history, 1)


async def test_bad_replay_requests_are_ignored_with_one_warning(publish, context, caplog):
    publisher, history = publish()
    await add_batches(publisher, history, NUM_BATCHES)
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        for _ in range(5 * sockets.PORTION):
            await dealer.send_multipart((b"", b"not a number"))
        assert await read_replay(dealer, 0) == list(range(NUM_BATCHES))
    assert caplog.text.count("a request for KV events is ignored") == 1


async def test_too_many_replays_at_once_are_ignored(publish, context, monkeypatch):
    monkeypatch.setattr(sockets, "MAX_REPLAYS", 1)
    publisher, history = publish()
    await add_batches(publisher, history, NUM_BATCHES)
    with context.socket(zmq.DEALER) as stuck, context.socket(zmq.DEALER) as dealer:
        for socket in (stuck, dealer):
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.connect(publisher.replay_endpoint)
        await stuck.send_multipart((b"", bytes(8)))
        await stuck.recv_multipart()
        await dealer.send_multipart((b"", bytes(8)))
        assert not await dealer.poll(100)
        await stuck.send_multipart((b"", NUM_BATCHES.to_bytes(8, "big")))  # a new request takes the place of its first
        while (await stuck.recv_multipart())[2] != END_NUMBER:
            pass
        assert await read_replay(dealer, NUM_BATCHES - 1) == [NUM_BATCHES - 1]


async def test_an_answer_that_is_not_read_keeps_its_place(publish, context, monkeypatch):
    """Its batches do not all wait in the connection, of which there may be any number."""
    monkeypatch.setattr(sockets, "MAX_REPLAYS", 1)
    publisher, history = publish()
    await add_batches(publisher, history, 500)
    with context.socket(zmq.DEALER) as stuck, context.socket(zmq.DEALER) as dealer:
        stuck.setsockopt(zmq.RCVBUF, 4096)
        for socket in (stuck, dealer):
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.connect(publisher.replay_endpoint)
        await stuck.send_multipart((b"", bytes(8)))
        await stuck.recv_multipart()
        await dealer.send_multipart((b"", bytes(8)))
        assert not await dealer.poll(400)


async def test_sockets_are_closed_if_no_thread_can_start(monkeypatch):
    contexts = []

    class Context(zmq.Context[Any]):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            contexts.append(self)

    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(zmq, "Context", Context)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        PublisherSockets(KvEventsConfig(enable_kv_cache_events=True, endpoint=ANY), BatchHistory(1, 1))
    assert contexts[0].closed


async def test_skipped_batches_are_warned_of(caplog):
    history = BatchHistory(5, 1)
    for _ in range(4):
        history.add_batch(BATCH)
    publisher = PublisherSockets(KvEventsConfig(enable_kv_cache_events=True, endpoint=ANY), history)
    publisher.wake()
    publisher.close()
    assert "3 batches were not published" in caplog.text
