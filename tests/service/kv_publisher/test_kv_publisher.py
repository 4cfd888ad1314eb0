"""KV events over ZeroMQ from a whole service: a router with vLLM's decoder knows which prefixes are cached."""

import asyncio
import hashlib
import logging
import urllib.request
from typing import Any

import pytest
import zmq
import zmq.asyncio
from waiting import until

import penstock.v1 as pb
from penstock.service.config.kv_events import KvEventsConfig

KEY = "k" * 40
ANY = "tcp://127.0.0.1:0"
CONFIG = KvEventsConfig(enable_kv_cache_events=True, endpoint=ANY, replay_endpoint=ANY)


async def complete(service, text, tenant="", metadata=(), **fields):
    start = pb.GenerationStart(text=text, tenant=tenant, sampling=pb.SamplingParams(max_tokens=1), **fields)
    await service.generation.Complete(pb.CompleteRequest(start=start), metadata=metadata)


async def test_a_subscriber_rebuilds_the_index_through_a_gap_by_replay(start_service, subscribe):
    service = await start_service(kv_events=CONFIG)
    log, publisher = service.engine.kv_events, service.server.kv_events
    router = subscribe(publisher)
    await complete(service, "a" * 40)
    await router.catch_up(log)
    assert router.index.texts() == {("", "a" * 16), ("", "a" * 32)}
    router.leave()
    for letter in "bcd":
        number = publisher.history.num_batches
        await complete(service, letter * 20)
        while publisher.history.num_batches == number:  # noqa: ASYNC110 - batches come a moment later
            await asyncio.sleep(0.001)
    while publisher.history.num_published < publisher.history.num_batches:  # noqa: ASYNC110 - by a thread
        await asyncio.sleep(0.001)
    router.connect()
    for turn in range(1000):  # a subscription takes a moment, and events until then are missed too
        await complete(service, f"{turn:04}" * 5)
        if await router.socket.poll(20):
            break
    await router.catch_up(log)
    gap = router.gaps[-1]
    assert gap[1] - gap[0] >= 3, "three batches at least were missed"
    assert {("", letter * 16) for letter in "bcd"} < router.index.texts()


async def test_a_router_that_comes_late_gets_everything_by_replay(start_service, subscribe, tmp_path):
    endpoints: dict[str, Any] = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    config = KvEventsConfig(enable_kv_cache_events=True, topic="kv@pod@bytes", **endpoints)
    service = await start_service(kv_events=config)
    assert service.server.kv_events.endpoint == endpoints["endpoint"]
    await complete(service, "e" * 40)
    router = subscribe(service.server.kv_events, b"kv@pod@bytes")
    async with asyncio.timeout(60):
        while len(router.index.blocks["GPU"]) < 2:
            await router.replay()
    await router.catch_up(service.engine.kv_events)


async def test_tenants_do_not_look_alike_and_blocks_name_their_session(start_service, subscribe, tmp_path, load_keys):
    path = tmp_path / "keys"
    path.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} default act-for-others\n")
    service = await start_service(kv_events=CONFIG, authenticator=load_keys(path))
    router = subscribe(service.server.kv_events)
    metadata = (("authorization", f"Bearer {KEY}"),)
    for tenant in ("", "acme", "bolt"):
        await complete(service, "s" * 40, tenant, metadata)
    await complete(service, "s" * 40 + "t" * 20, "acme", metadata, session_id="talk")
    await router.catch_up(service.engine.kv_events)
    prefixes = {"s" * 16, "s" * 32}
    shared = {(salt, text) for salt in ("", "acme", "bolt") for text in prefixes}
    assert router.index.texts() == shared | {("acme", "s" * 40 + "t" * 8)}
    assert router.index.sessions == {None, "talk"}


async def test_a_flush_clears_the_index(start_service, subscribe):
    service = await start_service(kv_events=CONFIG)
    router, log = subscribe(service.server.kv_events), service.engine.kv_events
    await complete(service, "f" * 40)
    await router.catch_up(log)
    service.engine.flush_cache()
    await complete(service, "g" * 20)
    await router.catch_up(log)
    assert router.index.texts() == {("", "g" * 16)}
    assert router.index.num_cleared == 2


async def test_its_batches_are_counted(start_service, subscribe):
    service = await start_service(kv_events=CONFIG, metrics_listen="127.0.0.1:0")
    await complete(service, "h" * 40)
    await subscribe(service.server.kv_events).replay()
    history = service.server.kv_events.history
    page = f"http://{service.server.metrics_target}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, page) as response:
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
    assert 0 < float(lines["penstock_kv_events_batches_total"]) <= history.num_batches
    assert float(lines["penstock_kv_events_dropped_batches_total"]) == 0


async def test_the_log_has_the_address_and_a_warning_if_others_can_reach_it(start_service, caplog):
    with caplog.at_level(logging.INFO):
        await start_service(kv_events=CONFIG)
        assert "anyone" not in caplog.text
        for endpoint in ("tcp://*:0", "tcp://127.0.0.1:9"):
            await start_service(kv_events=KvEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
    assert "KV events: the service listens on tcp://0.0.0.0:" in caplog.text
    assert "KV events: the service connects to tcp://127.0.0.1:9; replays: none" in caplog.text
    assert "anyone who can reach tcp://0.0.0.0:" in caplog.text


async def test_without_the_flag_nothing_is_published(start_service):
    service = await start_service()
    assert service.server.kv_events is None
    assert not service.engine.kv_events.keeps_details


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"short"], [b"y", bytes(8)], [b"", bytes(8), b"more"]])
async def test_a_malformed_request_is_ignored(start_service, subscribe, frames):
    service = await start_service(kv_events=CONFIG)
    # The first batch, which a thread publishes: without it the replay is empty.
    await until(lambda: service.server.kv_events.history.num_published)
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as socket:
        socket.connect(service.server.kv_events.replay_endpoint)
        await socket.send_multipart(frames)
        await socket.send_multipart([b"", bytes(8)])
        first = await socket.recv_multipart()
    context.term()
    assert first[2] == bytes(8), "the answer to the second request is the first message"
