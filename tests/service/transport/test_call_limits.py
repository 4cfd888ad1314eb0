"""What strangers and callers may leave in the service: metadata, messages that never end, answers that nobody reads."""

import asyncio
import gc
import ssl
import struct
from collections import Counter

import pytest
from grpc_health.v1 import health_pb2
from memory import held_bytes_counter
from waiting import until
from wire.raw_http2 import raw_client

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import AllowAll, BearerAuthenticator, Principal
from penstock.service.auth.tls import ServerTls
from penstock.service.streaming import outbox
from penstock.service.transport import call_end, call_limits, unread

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
OPEN = (CHECK, WATCH, REFLECTION)
GENERATE, GENERATE_ONE, COMPLETE = (
    f"/penstock.v1.GenerationService/{name}" for name in ("Generate", "GenerateOne", "Complete")
)
EMBED, GET_MODEL = "/penstock.v1.EmbeddingService/Embed", "/penstock.v1.ModelService/GetModel"
TOKENIZE, DETOKENIZE = (f"/penstock.v1.TokenizerService/{name}" for name in ("Tokenize", "Detokenize"))
DRAIN, WATCH_STATS = (f"/penstock.v1.AdminService/{name}" for name in ("Drain", "WatchStats"))
CALLERS = (GENERATE, GENERATE_ONE, COMPLETE, EMBED, GET_MODEL, TOKENIZE)
UNKNOWN = "/no.such.Service/Method"
MIB = 1 << 20
BEGINNING = struct.pack(">BI", 0, 8 * MIB) + bytes(2 * MIB)
"""Of a message that never ends."""
OK, CANCELLED, INVALID, DEADLINE, EXHAUSTED, NO_KEY = "0", "1", "3", "4", "8", "16"


def framed(message):
    raw = message.SerializeToString()
    return struct.pack(">BI", 0, len(raw)) + raw


class OneKey:
    """Of one tenant."""

    def principal_of(self, credential):
        return Principal("one") if credential == "key" else None


KEY = {"authorization": "Bearer key"}


@pytest.fixture(params=["tcp", "tls", "unix"])
async def listener(request, start_service, tmp_path, new_authority):
    """Where a service listens, as what, and what a client wants to know of its TLS."""
    if request.param == "unix":
        return await start_service(
            listen=f"unix:{tmp_path / 'socket'}", authenticator=BearerAuthenticator([OneKey])
        ), None
    if request.param == "tcp":
        return await start_service(authenticator=BearerAuthenticator([OneKey])), None
    authority = new_authority("ours")
    certificate, key = authority.issue()
    paths = [tmp_path / name for name in ("certificate", "key", "ca")]
    for path, content in zip(paths, (certificate, key, authority.pem), strict=True):
        path.write_bytes(content)
    context = ssl.create_default_context(cafile=str(paths[2]))
    context.set_alpn_protocols(["h2"])
    service = await start_service(tls=ServerTls(paths[0], paths[1]), authenticator=BearerAuthenticator([OneKey]))
    return service, context


@pytest.fixture
async def service(start_service):
    """For callers with a key, and with an administration."""
    return await start_service(
        FakeExecutor(vocab_size=258), authenticator=BearerAuthenticator([OneKey]), admin_listen="127.0.0.1:0"
    )


@pytest.fixture
def no_collector():
    """What is left in reference cycles stays there. Older objects are ignored."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


async def check(client):
    """Calls a method that is open to everyone; returns what that ends with."""
    stream = client.begin(CHECK)
    await client.put(stream, bytes(5), ends=True)
    return await client.end(stream)


# ---------------------------------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize("path", [*OPEN, GENERATE, COMPLETE, UNKNOWN])
async def test_a_head_of_megabytes_ends_its_connection(service, path, no_collector):
    """The client has not acknowledged the bound, so gRPC takes it."""
    head = {"x-a": "v" * (8 * MIB)}
    held_bytes = held_bytes_counter()
    before = held_bytes()
    for _ in range(8):
        async with raw_client(service.target, acknowledges=False) as client:
            client.begin(path, head)
            await client.closed()
    await until(lambda: held_bytes() - before < 8 * MIB)  # one head; the client is in this process too


async def test_a_head_of_megabytes_ends_at_every_listener(listener, no_collector):
    """On a Unix socket the connection stays. Its call is cancelled, or refused if it is read before that."""
    service, tls = listener
    async with raw_client(service.target, tls=tls, acknowledges=False) as client:
        stream = client.begin(WATCH, {"x-a": "v" * MIB})
        assert await client.end(stream) in ("closed", "reset", CANCELLED, EXHAUSTED)


async def test_a_head_of_megabytes_ends_its_connection_to_the_administration(service):
    async with raw_client(service.server.admin_target, acknowledges=False) as client:
        client.begin(WATCH, {"x-a": "v" * MIB})
        await client.closed()


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECTION, COMPLETE, GENERATE, UNKNOWN])
async def test_a_head_that_is_little_too_large_is_refused_and_the_connection_goes_on(service, path):
    async with raw_client(service.target, acknowledges=False) as client:
        stream = client.begin(path, {"x-a": "v" * (20 << 10)})
        assert await client.end(stream) == EXHAUSTED
        assert b"16 KiB of metadata" in client.details[stream]
        stream = client.begin(CHECK)
        await client.put(stream, bytes(5), ends=True)
        assert await client.end(stream) == OK


# ---------------------------------------------------------------------------------------------- messages that never end


async def begin_message(client, path, metadata=None):
    stream = client.begin(path, metadata)
    await client.put(stream, BEGINNING)
    return stream


@pytest.mark.parametrize("path", OPEN)
async def test_a_message_without_a_key_that_never_ends_gives_way(listener, path, monkeypatch):
    """The oldest does, as soon as others come; those that are whole are answered."""
    service, tls = listener
    async with raw_client(service.target, tls=tls) as client, raw_client(service.target, tls=tls) as probe:
        streams = [client.begin(path) for _ in range(30)]
        putting = [asyncio.create_task(client.put(stream, BEGINNING)) for stream in streams]
        await until(lambda: len(client.ended) >= 30 - call_limits.OPEN_MESSAGES_OF_HOST)
        assert set(client.ended.values()) == {EXHAUSTED}
        stream = probe.begin(CHECK)
        await probe.put(stream, bytes(5), ends=True)
        assert await probe.end(stream) == OK
        for task in putting:
            task.cancel()


@pytest.mark.parametrize("path", CALLERS)
async def test_a_message_that_never_ends_has_a_time_limit(start_service, path, monkeypatch):
    monkeypatch.setattr(call_limits, "PATIENCE_S", 0.2)
    service = await start_service(authenticator=BearerAuthenticator([OneKey]))
    async with raw_client(service.target) as client:
        stream = await begin_message(client, path, KEY)
        assert await client.end(stream) == DEADLINE
        assert b"within 0.2 s" in client.details[stream]


@pytest.mark.parametrize("path", [DRAIN, WATCH_STATS])
async def test_a_message_to_the_administration_that_never_ends_has_a_time_limit(start_service, path, monkeypatch):
    monkeypatch.setattr(call_limits, "PATIENCE_S", 0.2)
    service = await start_service(authenticator=AllowAll(), admin_listen="127.0.0.1:0")
    async with raw_client(service.server.admin_target) as client:
        assert await client.end(await begin_message(client, path)) == DEADLINE


@pytest.mark.parametrize("path", [*CALLERS, DETOKENIZE])
async def test_whoever_has_no_key_is_refused_before_the_message_has_come(service, path):
    async with raw_client(service.target) as client:
        stream = client.begin(path)
        await client.put(stream, BEGINNING[:100])
        assert await client.end(stream) == NO_KEY


async def test_a_tenant_may_not_have_all_messages_that_are_on_their_way(start_service, monkeypatch):
    """Its next ones wait for its own; another tenant's do not."""

    class Keys:
        def principal_of(self, credential):
            return Principal(credential)

    monkeypatch.setattr(call_limits, "HOLD_S", 3600.0)
    service = await start_service(authenticator=BearerAuthenticator([Keys]))
    async with raw_client(service.target) as client, raw_client(service.target) as other:
        stuck = [client.begin(COMPLETE, {"authorization": "Bearer a"}) for _ in range(call_limits.MESSAGES_OF_TENANT)]
        for stream in stuck:
            await client.put(stream, BEGINNING[:100])
        messages = service.server._running._limits.messages
        await until(lambda: messages.num_taken == len(stuck))
        one_more = client.begin(GET_MODEL, {"authorization": "Bearer a"})
        await client.put(one_more, framed(pb.GetModelRequest()), ends=True)
        stream = other.begin(GET_MODEL, {"authorization": "Bearer b"})
        await other.put(stream, framed(pb.GetModelRequest()), ends=True)
        assert await other.end(stream) == OK
        assert one_more not in client.ended


async def test_unread_output_takes_at_most_a_window(service, monkeypatch):
    """A call that waits for its turn, of which gRPC would take 4 MiB by itself."""
    monkeypatch.setattr(call_limits, "HOLD_S", 3600.0)
    async with raw_client(service.target) as client:
        done = client.begin(COMPLETE, KEY)  # a large message that is read: gRPC estimates the bandwidth by it
        await client.put(done, framed(pb.CompleteRequest(start=pb.GenerationStart(text="a" * MIB))), ends=True)
        assert await client.end(done) == INVALID
        stuck = [client.begin(COMPLETE, KEY) for _ in range(call_limits.MESSAGES_OF_TENANT)]
        for stream in stuck:
            await client.put(stream, BEGINNING[:100])
        await until(lambda: service.server._running._limits.messages.num_taken == len(stuck))
        waiting = client.begin(COMPLETE, KEY)
        putting = asyncio.create_task(client.put(waiting, BEGINNING))
        await until(lambda: client.room(waiting) <= 0)
        check = client.begin(CHECK)
        await client.put(check, bytes(5), ends=True)
        assert await client.end(check) == OK
        assert client.room(waiting) <= 0
        putting.cancel()


async def test_waiting_calls_of_a_tenant_do_not_keep_another_out(start_service, monkeypatch):
    """Nor the operators, whatever callers hold."""

    class Keys:
        def principal_of(self, credential):
            return Principal(credential, may_administer=credential == "operator")

    for name, value in (("HOLD_S", 3600.0), ("MESSAGES", 1), ("_WAITING_OF_TENANT", 2), ("_MAX_WAITING", 2)):
        monkeypatch.setattr(call_limits, name, value)
    service = await start_service(authenticator=BearerAuthenticator([Keys]), admin_listen="127.0.0.1:0")
    async with raw_client(service.target) as client, raw_client(service.server.admin_target) as admin:
        stuck = [client.begin(COMPLETE, {"authorization": "Bearer a"}) for _ in range(4)]
        for stream in stuck:
            await client.put(stream, BEGINNING[:100])
        assert await client.end(stuck[3]) == EXHAUSTED
        stream = client.begin(GET_MODEL, {"authorization": "Bearer b"})
        await client.put(stream, framed(pb.GetModelRequest()), ends=True)
        assert await client.end(stream) == OK
        stream = admin.begin(DRAIN, {"authorization": "Bearer operator"})
        await admin.put(stream, framed(pb.DrainRequest()), ends=True)
        assert await admin.end(stream) == OK


async def begin_in_order(service, client, path, number):
    """Calls without a key. Each begins once the one before it holds a place, since gRPC may deliver them in another
    order."""
    open_calls = service.server._running._limits.open_calls
    streams: list[int] = []
    while len(streams) < number:
        streams.append(client.begin(path))
        await client.put(streams[-1], bytes(5), ends=True)
        await until(lambda: open_calls.num_taken == len(streams))
    return streams


async def test_a_call_without_a_key_counts_until_its_answer_is_sent(start_service, monkeypatch):
    monkeypatch.setattr(call_limits, "OPEN_CALLS_OF_HOST", 3)
    service = await start_service(authenticator=BearerAuthenticator([OneKey]))
    async with raw_client(service.target, window=0) as client:
        streams = await begin_in_order(service, client, CHECK, 3)
        streams.append(client.begin(CHECK))
        await client.put(streams[-1], bytes(5), ends=True)
        assert await client.end(streams[0]) in (EXHAUSTED, CANCELLED, "reset")
        assert not set(streams[1:]) & set(client.ended)


async def test_calls_without_a_key_that_last_give_way(start_service, monkeypatch):
    monkeypatch.setattr(call_limits, "OPEN_CALLS_OF_HOST", 3)
    service = await start_service(authenticator=BearerAuthenticator([OneKey]))
    async with raw_client(service.target) as client:
        watches = await begin_in_order(service, client, WATCH, 3)
        watches.append(client.begin(WATCH))
        await client.put(watches[-1], bytes(5), ends=True)
        assert await client.end(watches[0]) == EXHAUSTED
        assert not set(watches[1:]) & set(client.ended)


# ------------------------------------------------------------------------------------------------ answers nobody reads

ANSWERED = {
    COMPLETE: pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=5))),
    GENERATE_ONE: pb.GenerateOneRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=5))),
    GENERATE: pb.GenerateRequest(start=pb.GenerationStart(ref=1, text="hi", sampling=pb.SamplingParams(max_tokens=5))),
    GET_MODEL: pb.GetModelRequest(),
    DETOKENIZE: pb.DetokenizeRequest(token_ids=[97] * 1000),
    CHECK: health_pb2.HealthCheckRequest(),
    WATCH: health_pb2.HealthCheckRequest(),
}


def calls_of_grpc():
    """What grpc.aio has of each call: a task that waits for the call's end."""
    return Counter(task.get_name() for task in asyncio.all_tasks())["rpc_task"]


@pytest.mark.parametrize("path", ANSWERED)
async def test_an_unread_answer_has_a_time_limit(start_service, path, monkeypatch):
    """And then nothing is left of its call."""
    for module in (call_end, unread):
        monkeypatch.setattr(module, "WRITE_PATIENCE_S", 0.05)
    monkeypatch.setattr(unread, "CHECK_S", 0.02)
    monkeypatch.setattr(unread, "SOON_S", 0.02)
    monkeypatch.setattr(outbox, "STALLED_S", 0.05)
    service = await start_service(authenticator=BearerAuthenticator([OneKey]), heartbeat_s=0.05)
    async with raw_client(service.target, window=0) as client, raw_client(service.target) as other:
        stream = client.begin(path, KEY)
        await client.put(stream, framed(ANSWERED[path]), ends=path != GENERATE)
        while stream not in client.ended:  # grpc.aio knows the newest call until the next one comes
            await check(other)
        assert client.ended[stream] in (CANCELLED, EXHAUSTED, "reset")
        await until(lambda: calls_of_grpc() == 0)
        assert client.num_bytes == 0


async def test_too_many_unread_answers_end_sooner(start_service, monkeypatch):
    """A tenant's oldest ones go first, and only as many as are too many."""
    monkeypatch.setattr(unread, "CHECK_S", 0.02)
    monkeypatch.setattr(unread, "SOON_S", 0.0)
    monkeypatch.setattr(unread, "MAX_BYTES_OF_TENANT", 2 * unread.CALL_BYTES + 7000)
    service = await start_service(authenticator=BearerAuthenticator([OneKey]))
    async with raw_client(service.target, window=0) as client:
        streams = []
        for _ in range(3):
            streams.append(client.begin(DETOKENIZE, KEY))
            request = pb.DetokenizeRequest(token_ids=[97] * 3000)
            await client.put(streams[-1], framed(request), ends=True)
        assert await client.end(streams[0]) == CANCELLED
        assert not set(streams[1:]) & set(client.ended)


# --------------------------------------------------------------------------------------------------- what is left of it


def left_of_refusals():
    """Each of these would keep the call and all that was read of it."""
    left = Counter(type(each).__name__ for each in gc.get_objects())
    return left["frame"] + left["_ServicerContext"] + left["AbortError"]


@pytest.mark.parametrize("path", [UNKNOWN, GET_MODEL, COMPLETE])
async def test_a_refused_call_leaves_nothing_for_the_collector(service, path, no_collector):
    """But for what grpc.aio itself leaves: its metadata, and the newest call until the next one comes."""
    async with raw_client(service.target) as client:
        for metadata in ({}, KEY) * 4:
            stream = client.begin(path, metadata)
            await client.put(stream, framed(pb.CompleteRequest(start=pb.GenerationStart())), ends=True)
            await client.end(stream)
        await until(lambda: calls_of_grpc() == 0)
        await until(lambda: left_of_refusals() <= 1)
