"""A router's side of KV events: vLLM 0.33's decoder, and the index that a router keeps."""

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """Fields, order, tags and defaults are those of vllm/distributed/kv_events.py."""


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Index:
    """A router's index of one service. A block's key is computed from a prompt, as routers do, without the service's
    hashes: from the key of the block before, the tokens, and the other inputs of the hash."""

    def __init__(self):
        self.blocks: dict[str | None, dict[Any, Any]] = {"GPU": {}, "CPU": {}}
        self.sessions = set()
        self.num_cleared = 0
        self._keys: dict[Any, Any] = {None: None}
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def apply(self, payload):
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.num_cleared += 1
                    for blocks in self.blocks.values():
                        blocks.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.blocks[event.medium][block_hash]
                case BlockStored():
                    self._store(event)

    def _store(self, event):
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        if event.medium == "GPU":
            assert parent is None or parent in self.blocks["GPU"], "a block comes before the one that it follows"
        self.sessions.add(event.session_id)
        for number, block_hash in enumerate(event.block_hashes):
            extra = None if event.extra_keys is None else event.extra_keys[number]
            # In host memory, the block before may have been stored and removed between batches.
            key = (self._keys.get(parent, parent), tuple(event.token_ids[number * size : (number + 1) * size]), extra)
            self._keys[block_hash] = key
            assert block_hash not in self.blocks[event.medium], "a block is stored twice"
            self.blocks[event.medium][block_hash] = key
            parent = block_hash

    def texts(self):
        """Returns every prefix that it knows, as (salt, text)."""

        def read(key):
            before, token_ids, extra = key
            salt, text = ("", "") if before is None else read(before)
            return "".join(extra or ()) + salt, text + bytes(token_ids).decode()

        return {read(key) for blocks in self.blocks.values() for key in blocks.values()}


class Subscriber:
    """Subscribes, and requests a replay of missed batches."""

    def __init__(self, context, publisher, topic=b""):
        self.index = Index()
        self.last = -1
        self.gaps = []
        self._publisher = publisher
        self._topic = topic
        self._context = context
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.connect()

    def connect(self):
        self.socket.connect(self._publisher.endpoint)

    def leave(self):
        self.socket.disconnect(self._publisher.endpoint)

    async def read(self):
        topic, number, payload = await self.socket.recv_multipart()
        assert topic == self._topic
        number = int.from_bytes(number, "big")
        if number > self.last + 1:
            self.gaps.append((self.last + 1, number))
            await self.replay()
        if number > self.last:
            self.index.apply(payload)
            self.last = number

    async def replay(self):
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._publisher.replay_endpoint)
            await socket.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
            while True:
                empty, topic, number, payload = await socket.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (topic, payload) == (b"", b"")
                    return
                assert topic == self._topic
                self.last += 1
                assert int.from_bytes(number, "big") == self.last
                self.index.apply(payload)

    async def catch_up(self, log):
        """Reads until it knows every block of the service, and no other."""
        async with asyncio.timeout(120):
            while (
                self.index.blocks["GPU"].keys() | self.index.blocks["CPU"].keys() != numbers(log.hashes)
                or self.index.num_cleared == 0
            ):
                await self.read()


def numbers(hashes):
    return {int.from_bytes(block_hash[-8:], "big") for block_hash in hashes}


@pytest.fixture
async def subscribe():
    """Makes subscribers of a publisher."""
    context, subscribers = zmq.asyncio.Context(), []

    def subscribe(publisher, topic=b""):
        subscribers.append(Subscriber(context, publisher, topic))
        return subscribers[-1]

    yield subscribe
    for subscriber in subscribers:
        subscriber.socket.close(linger=0)
    context.term()


@pytest.fixture
def new_index():
    return Index


@pytest.fixture
def numbers_of():
    return numbers
