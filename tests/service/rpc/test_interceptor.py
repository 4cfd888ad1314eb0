"""The guard: whoever has no key can leave little in the service, and for a short time."""

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import penstock.v1 as pb
from penstock.service.auth.identity import BearerAuthenticator
from penstock.service.transport import call_limits

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def health_of_a_service_with_a_long_name(num_bytes):
    return health_pb2.HealthCheckRequest(service="x" * (num_bytes - 3))


def services_of_a_long_host(num_bytes):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    request.host = "x" * (num_bytes - 3 - request.ByteSize())
    return request


OPEN = {
    CHECK: (health_of_a_service_with_a_long_name, grpc.StatusCode.NOT_FOUND),
    WATCH: (health_of_a_service_with_a_long_name, grpc.StatusCode.OK),
    REFLECTION: (services_of_a_long_host, grpc.StatusCode.OK),
}
"""Methods that are open to everyone: a request of a given size, and what it is answered with."""


@pytest.fixture
async def channel(start_service):
    """To a service that knows no key."""
    return (await start_service(authenticator=BearerAuthenticator([]))).channel


async def failure(call):
    """What a call ends with before it brings a message."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    return error.value


@pytest.mark.parametrize("path", OPEN)
async def test_public_methods_accept_only_small_messages(channel, path, details_of):
    make, code = OPEN[path]
    small, large = make(call_limits.MAX_OPEN_MESSAGE_BYTES), make(call_limits.MAX_OPEN_MESSAGE_BYTES + 1)
    assert (small.ByteSize(), large.ByteSize()) == (4096, 4097)
    call = channel.stream_stream(path)(iter([small.SerializeToString()]))
    if code is grpc.StatusCode.OK:
        assert await call.read()
        call.cancel()
    else:
        assert (await failure(call)).code() is code
    error = await failure(channel.stream_stream(path)(iter([large.SerializeToString()])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 4,096 bytes" in error.details()
    assert details_of(error)["ErrorInfo"].reason == "TOO_EXPENSIVE"


async def test_every_message_of_a_stream_that_is_open_to_everyone_is_small(channel):
    call = channel.stream_stream(REFLECTION)()
    await call.write(services_of_a_long_host(4096).SerializeToString())
    assert await call.read()
    await call.write(services_of_a_long_host(4097).SerializeToString())
    assert (await failure(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("path", OPEN)
async def test_what_is_open_to_everyone_does_not_wait_for_ever(start_service, path, monkeypatch):
    """gRPC keeps the beginning of a message for as long as somebody waits for its end."""
    monkeypatch.setattr(call_limits, "OPEN_PATIENCE_S", 0.01)
    channel = (await start_service(authenticator=BearerAuthenticator([]))).channel
    error = await failure(channel.stream_stream(path)())
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.01 s" in error.details()


async def test_a_message_of_more_than_8_mib_ends_its_stream(start_service, new_reading):
    """As the proto says. One of less is refused in band, by its field."""
    service = await start_service()
    start = pb.GenerationStart(ref=1, token_ids=pb.TokenIds(ids=[1] * ((8 << 20) - 100)))
    reading = await new_reading().read(service.generation.Generate(iter([pb.GenerateRequest(start=start)])))
    assert reading.outcomes[1].finished[0].status.message.startswith("token_ids.ids")
    start.token_ids.ids.extend([1] * 200)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await new_reading().read(service.generation.Generate(iter([pb.GenerateRequest(start=start)])))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_is_refused_by_its_size_and_never_at_random(start_service):
    service = await start_service()
    request = pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=1)))

    async def outcomes(num_bytes: int) -> set[grpc.StatusCode]:
        found = set()
        for _ in range(3):
            call = service.generation.Complete(request, metadata=(("x", "y" * num_bytes),))
            found.add(await call.code())
        return found

    assert await outcomes(15_000) == {grpc.StatusCode.OK}
    assert await outcomes(17_000) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
