"""WatchKvEvents of a whole service: what requests leave in the cache is told, with their tokens, tenant by tenant."""

import asyncio
import hashlib
import random
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.testing.fake_executor import FakeExecutor

ANY_PORT = "127.0.0.1:0"
KEY = "k" * 40
METADATA = (("authorization", f"Bearer {KEY}"),)


@pytest.fixture
def keys(tmp_path, load_keys):
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} gateway act-for-others admin\n")
    return load_keys(path)


class Mirror:
    """Blocks by hash, kept up to date by one call after the other."""

    def __init__(self, service, metadata=()):
        self._service = service
        self._metadata = metadata
        self._stream_id = ""
        self.blocks = {}
        self.sequence = 0
        self.num_cleared = 0
        self.connect()

    def connect(self):
        request = pb.WatchKvEventsRequest(after_sequence=self.sequence, stream_id=self._stream_id)
        self.call = self._service.admin.WatchKvEvents(request, metadata=self._metadata)

    async def read(self):
        message = await self.call.read()
        if message.cleared:
            self.blocks.clear()
            self.num_cleared += 1
        for block_hash in message.removed_hashes:
            self.blocks.pop(block_hash, None)
        self.blocks |= {block.hash: block for block in message.stored}
        self.sequence, self._stream_id = message.sequence, message.stream_id
        return message

    async def catch_up(self):
        log = self._service.engine.kv_events
        async with asyncio.timeout(120):
            while self.sequence != log.sequence:
                await self.read()
        assert self.blocks.keys() == set(log.hashes)

    def texts(self):
        """Of every block, from the beginning of its sequence on."""

        def text(block):
            before = text(self.blocks[block.parent_hash]) if block.parent_hash else ""
            return before + bytes(block.token_ids).decode()

        return {text(block) for block in self.blocks.values()}


def complete(service, text, tenant="", max_tokens=40, metadata=()):
    sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    start = pb.GenerationStart(text=text, tenant=tenant, sampling=sampling)
    return service.generation.Complete(pb.CompleteRequest(start=start), metadata=metadata)


async def test_the_blocks_of_a_request_spell_its_prompt_and_its_output(start_service):
    service = await start_service(admin_listen=ANY_PORT)
    mirror = Mirror(service)
    first = await mirror.read()
    assert (first.cleared, list(first.stored), first.block_size) == (True, [], 16)
    answer = await complete(service, "x" * 20)
    await mirror.catch_up()
    whole = "x" * 20 + answer.choices[0].text
    assert mirror.texts() == {whole[:end] for end in (16, 32, 48)}, "the last token's KV is never computed"


async def test_equal_prompts_of_two_tenants_have_different_hashes(start_service, keys):
    service = await start_service(admin_listen=ANY_PORT, authenticator=keys)
    mirror = Mirror(service, METADATA)
    seen = []
    for tenant in ("one", "other"):
        before = set(mirror.blocks)
        await complete(service, "the same words for both of them, " * 3, tenant, metadata=METADATA)
        await mirror.catch_up()
        seen.append({block_hash: mirror.blocks[block_hash] for block_hash in mirror.blocks.keys() - before})
    assert seen[0].keys().isdisjoint(seen[1])
    tokens = [sorted(tuple(block.token_ids) for block in blocks.values()) for blocks in seen]
    assert tokens[0] == tokens[1] != []


async def test_a_worker_that_dies_takes_the_cache_along(start_service):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"))
    service = await start_service(executor, admin_listen=ANY_PORT)
    mirror = Mirror(service)
    await complete(service, "x" * 50)
    await mirror.catch_up()
    assert mirror.blocks
    executor.die()
    message = await mirror.read()
    assert (message.cleared, list(message.stored)) == (True, [])
    async with asyncio.timeout(120):
        while service.engine.state is not EngineState.SERVING:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    await complete(service, "y" * 50)
    await mirror.catch_up()
    assert {text[:1] for text in mirror.texts()} == {"y"}


async def test_a_flush_and_the_blocks_it_keeps_are_reported(start_service):
    service = await start_service(admin_listen=ANY_PORT)
    mirror = Mirror(service)
    await complete(service, "x" * 50)
    await mirror.catch_up()
    await service.admin.FlushCache(pb.FlushCacheRequest())
    await mirror.catch_up()
    assert (mirror.blocks, mirror.num_cleared) == ({}, 2)


async def test_watchers_get_no_changes_without_a_prefix_cache(start_service):
    service = await start_service(admin_listen=ANY_PORT, scheduler=SchedulerConfig(enable_prefix_caching=False))
    mirror = Mirror(service)
    await mirror.read()
    await complete(service, "x" * 50)
    assert service.engine.kv_events.sequence == mirror.sequence
    mirror.call.cancel()


async def test_a_shutdown_is_reported_to_watchers(start_service):
    service = await start_service(admin_listen=ANY_PORT)
    mirror = Mirror(service)
    await mirror.read()
    await service.server.stop()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await mirror.read()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_mirror_stays_right_under_traffic_that_evicts_and_when_it_is_cut_off(start_service):
    """Requests that share beginnings, more than the pool holds, some of them retained."""
    executor = FakeExecutor(
        num_blocks=60, vocab_size=258, max_num_seqs=4, next_token=lambda history, sampling: 97 + len(history) % 7
    )
    service = await start_service(executor, admin_listen=ANY_PORT)
    mirror = Mirror(service)
    rng = random.Random(1)
    for _ in range(15):
        starts = []
        for _ in range(4):
            text = f"family {rng.randrange(3)} " * rng.randint(1, 20)
            retain_ms = rng.choice((0, 0, 5, 60_000))
            sampling = pb.SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
            starts.append(pb.GenerationStart(text=text + str(rng.random()), retain_ms=retain_ms, sampling=sampling))
        await asyncio.gather(*(service.generation.Complete(pb.CompleteRequest(start=start)) for start in starts))
        if rng.random() < 0.5:
            mirror.call.cancel()
            mirror.connect()
        await mirror.catch_up()
    assert service.engine.kv_events.sequence > 5 * 60
    assert mirror.num_cleared == 1, "it never had to begin anew"


async def test_the_mirror_of_the_docs_follows_and_tries_again(start_service):
    document = Path(__file__).parents[3] / "docs" / "kv_cache.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("asyncio.sleep(1)", "asyncio.sleep(0.01)"), names)
    service = await start_service(admin_listen=ANY_PORT)
    log = service.engine.kv_events
    blocks: dict[bytes, pb.KvBlock] = {}

    async def until_equal():
        async with asyncio.timeout(120):
            while blocks.keys() != set(log.hashes):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    following = asyncio.create_task(names["follow"](service.admin_channel, blocks))
    await complete(service, "x" * 50)
    await until_equal()
    assert blocks
    await service.server.stop()
    await asyncio.sleep(0.05)
    assert not following.done()
    following.cancel()
