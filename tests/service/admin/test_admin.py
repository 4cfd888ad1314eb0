"""The administration: where it listens, who may use it, and what draining and flushing do."""

import asyncio
import hashlib
import stat
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import until

import penstock.v1 as pb
from penstock.clients.health import LIVENESS
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.config.addresses import Address, ListenError, admin_address
from penstock.v1 import admin_pb2

ANY_PORT = "127.0.0.1:0"
SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
METHODS = {method.name: method for method in SERVICE.methods}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
KEYS = {"a tenant's": "t" * 40, "a gateway's": "g" * 40, "an operator's": "o" * 40}
RIGHTS = {"a tenant's": "", "a gateway's": "act-for-others", "an operator's": "admin"}


@pytest.fixture
def keys(tmp_path, load_keys):
    path = tmp_path / "keys"
    hashes = {whose: hashlib.sha256(key.encode()).hexdigest() for whose, key in KEYS.items()}
    path.write_text("".join(f"sha256:{hashes[whose]} acme {rights}\n" for whose, rights in RIGHTS.items()))
    return load_keys(path)


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


def raw_call(channel, name, metadata=None):
    """A call with an empty request, so that no method does more than answer or refuse."""
    call = channel.unary_unary(f"/{SERVICE.full_name}/{name}")
    if METHODS[name].server_streaming:
        call = channel.unary_stream(f"/{SERVICE.full_name}/{name}")
    return call(b"", metadata=metadata)


async def code_of(call):
    """What a call ends with; a stream that answers counts as OK."""
    try:
        await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


def slow(seconds_per_step=0.005):
    return FakeExecutor(
        vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=seconds_per_step
    )


def start(max_tokens=4, text="hi"):
    return pb.GenerationStart(ref=1, text=text, sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def complete(service, **fields):
    return service.generation.Complete(pb.CompleteRequest(start=start(**fields)))


class TestListening:
    """Where it is, by default and by its flag."""

    @pytest.mark.parametrize(
        ("flag", "service", "expected"),
        [
            (None, "127.0.0.1:50051", "127.0.0.1:50052"),
            (None, "0.0.0.0:8033", "127.0.0.1:8034"),
            (None, "127.0.0.1:65535", "127.0.0.1:65534"),
            (None, "[::]:0", "127.0.0.1:0"),
            (None, "unix:/run/s", "unix:/run/s.admin"),
            ("off", "127.0.0.1:50051", "None"),
            ("[::1]:7", "127.0.0.1:50051", "[::1]:7"),
            ("localhost:7", "127.0.0.1:50051", "localhost:7"),
            ("unix:/run/a", "unix:/run/s", "unix:/run/a"),
        ],
    )
    def test_the_admin_address_is_next_to_the_services_by_default(self, flag, service, expected):
        assert str(admin_address(flag, Address.parse(service), has_keys=False)) == expected

    @pytest.mark.parametrize(
        ("flag", "service", "problem"),
        [
            ("50052", "127.0.0.1:1", "must be HOST:PORT with a port of 0 to 65535, or unix:PATH, or off"),
            (None, f"unix:/{'x' * 105}", "the socket's path must be 1 to 107 bytes long"),
            ("0.0.0.0:9", "127.0.0.1:1", "anyone who reaches it could administer the service; give --api-keys-file"),
            ("[::]:9", "127.0.0.1:1", "or listen on 127.0.0.1 or a Unix socket"),
            ("some.host:9", "127.0.0.1:1", "anyone who reaches it"),
        ],
    )
    def test_what_it_may_not_be_is_one_line_with_the_remedy(self, flag, service, problem):
        with pytest.raises(ListenError) as error:
            admin_address(flag, Address.parse(service), has_keys=False)
        assert str(error.value).startswith("--admin-listen ")
        assert problem in str(error.value)
        assert "\n" not in str(error.value)

    def test_with_keys_it_may_be_anywhere(self):
        assert str(admin_address("0.0.0.0:9", Address.parse("0.0.0.0:1"), has_keys=True)) == "0.0.0.0:9"

    async def test_a_server_without_keys_is_never_open_to_other_machines(self, start_service):
        with pytest.raises(AssertionError, match="anyone could administer"):
            await start_service(admin_listen="0.0.0.0:0")

    async def test_a_port_in_use_is_named_with_its_flag_before_anything_starts(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)
        executor = slow()
        executor.start = None  # it must not come to that
        taken = service.server.admin_target
        with pytest.raises(
            ListenError, match=f"--admin-listen {taken}: the port is in use; stop what uses it or choose"
        ):
            await start_service(executor, admin_listen=taken)

    async def test_a_unix_socket_is_private_to_its_user_and_removed_at_shutdown(self, start_service, tmp_path):
        path = tmp_path / "s.admin"
        service = await start_service(listen=f"unix:{tmp_path}/s", admin_listen=f"unix:{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await service.admin.GetSettings(pb.GetSettingsRequest())).settings.max_num_seqs == 256
        await service.server.stop()
        assert not path.exists()

    async def test_without_it_there_is_none(self, start_service):
        service = await start_service()
        assert service.server.admin_target is None


class TestWhoMay:
    """Neither callers nor their listener."""

    @pytest.mark.parametrize("name", METHODS)
    async def test_the_callers_listener_has_none_of_it(self, start_service, name):
        service = await start_service(admin_listen=ANY_PORT)
        assert await code_of(raw_call(service.channel, name)) is grpc.StatusCode.UNIMPLEMENTED

    async def test_it_does_not_generate(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)
        call = service.admin_channel.unary_unary("/penstock.v1.GenerationService/Complete")
        assert await code_of(call(b"")) is grpc.StatusCode.UNIMPLEMENTED

    async def test_every_method_wants_an_operators_key_where_there_are_keys(self, start_service, keys):
        service = await start_service(admin_listen=ANY_PORT, authenticator=keys)
        for name in METHODS:
            for metadata in ((), bearer("wrong")):
                assert await code_of(raw_call(service.admin_channel, name, metadata)) is grpc.StatusCode.UNAUTHENTICATED
            for whose, key in KEYS.items():
                code = await code_of(raw_call(service.admin_channel, name, bearer(key)))
                assert (code is not grpc.StatusCode.PERMISSION_DENIED) is (whose == "an operator's"), (
                    name,
                    whose,
                    code,
                )

    async def test_without_keys_this_machine_may(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)
        denials = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}
        for name in METHODS:
            assert await code_of(raw_call(service.admin_channel, name)) not in denials

    async def test_a_key_without_admin_rights_is_refused_with_the_remedy(self, start_service, keys, details_of):
        service = await start_service(admin_listen=ANY_PORT, authenticator=keys)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await raw_call(service.admin_channel, "Drain", bearer(KEYS["a tenant's"]))
        assert details_of(error.value)["ErrorInfo"].reason == "ADMIN_DENIED"
        assert "add the word 'admin'" in str(error.value.details())

    async def test_health_and_reflection_are_open_on_it(self, start_service, keys):
        service = await start_service(admin_listen=ANY_PORT, authenticator=keys)
        health = health_pb2_grpc.HealthStub(service.admin_channel)
        for name in ("", LIVENESS, SERVICE.full_name):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(service.admin_channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {found.name for found in (await call.read()).list_services_response.service}
        reflections = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
        assert names == {SERVICE.full_name, "grpc.health.v1.Health", *reflections}


class TestDraining:
    """Out of the rotation and back, or to the end."""

    async def test_drain_refuses_what_is_new_and_finishes_the_rest_and_resume_undoes_it(
        self, start_service, new_reading
    ):
        service = await start_service(slow(), admin_listen=ANY_PORT)
        watcher = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watcher.read()).status == SERVING
        stream = service.generation.Generate()
        await stream.write(pb.GenerateRequest(start=start(max_tokens=50)))
        reading = await new_reading().read_until(stream, lambda r: r.outcomes[1].deltas > 0)

        assert (await service.admin.Drain(pb.DrainRequest())).live_requests == 1
        assert (await watcher.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await complete(service)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await reading.read_until(stream, lambda r: bool(r.outcomes[1].finished))
        assert reading.outcomes[1].text == "a" * 50
        assert reading.outcomes[1].finished[0].status.code == 0
        states = [message.heartbeat.state for message in reading.messages if message.HasField("heartbeat")]
        assert states == [pb.SERVICE_STATE_DRAINING]
        assert (await service.admin.Drain(pb.DrainRequest())).live_requests == 0

        await service.admin.Resume(pb.ResumeRequest())
        assert (await watcher.read()).status == SERVING
        assert (await stream.read()).heartbeat.state == pb.SERVICE_STATE_SERVING
        assert (await complete(service)).finished.status.code == 0
        watcher.cancel()

    async def test_resume_changes_nothing_where_nothing_was_drained(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)
        await service.admin.Resume(pb.ResumeRequest())
        assert (await complete(service)).finished.status.code == 0

    async def test_a_drained_service_stays_so_though_its_worker_is_replaced(self, start_service):
        executor = slow()
        service = await start_service(executor, admin_listen=ANY_PORT)
        call = service.generation.Complete(pb.CompleteRequest(start=start(max_tokens=50)))
        await until(lambda: service.engine.stats().running == 1)
        await service.admin.Drain(pb.DrainRequest())
        executor.die()
        await until(lambda: executor.num_starts == 2 and service.engine.state is EngineState.DRAINING)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await complete(service)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await call).choices[0].text == "a" * 50
        await service.admin.Resume(pb.ResumeRequest())
        assert (await complete(service)).finished.status.code == 0

    async def test_a_service_that_goes_down_shows_it_and_does_not_come_back(self, start_service, details_of):
        """Up until the grace is over, so that one sees what it waits for."""
        service = await start_service(slow(), admin_listen=ANY_PORT)
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start(max_tokens=4000)))
        await call.read()
        service.server.request_stop()
        stopping = asyncio.create_task(service.server.stop(grace_s=30))
        await asyncio.sleep(0)
        assert (await service.admin.Drain(pb.DrainRequest())).live_requests == 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.admin.Resume(pb.ResumeRequest())
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(error.value)["ErrorInfo"].reason == "GOING_DOWN"
        assert (await service.admin.Drain(pb.DrainRequest())).live_requests == 1
        call.cancel()
        await stopping

    async def test_a_signal_ends_a_drained_service_as_any_other(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)
        await service.admin.Drain(pb.DrainRequest())
        service.server.request_stop()
        await asyncio.wait_for(service.server.stop(grace_s=30), 120)


async def test_what_was_changed_is_logged_with_who_did_it(start_service, keys, caplog):
    service = await start_service(admin_listen=ANY_PORT, authenticator=keys)
    key = bearer(KEYS["an operator's"])
    with caplog.at_level("INFO", "penstock.service.admin.operations"):
        for name in ("Drain", "Resume", "Resume", "FlushCache", "GetSettings"):
            await raw_call(service.admin_channel, name, key)
        settings = pb.Settings(max_num_seqs=7, tenants=[pb.TenantSettings(tenant="b")])
        request = pb.UpdateSettingsRequest(settings=settings)
        await service.admin.UpdateSettings(request, metadata=key)
    assert caplog.messages == [
        "by tenant acme: new requests are refused",
        "by tenant acme: new requests are accepted again",
        "by tenant acme: 0 cached blocks are dropped",
        'by tenant acme: changed settings { max_num_seqs: 7 tenants { tenant: "b" } }',
    ]


class TestFlushing:
    """The cache is forgotten, and nothing else."""

    async def test_a_flush_forgets_what_no_request_holds(self, start_service):
        service = await start_service(admin_listen=ANY_PORT)

        async def cached():
            return (await complete(service, text="x" * 200)).finished.usage.cached_tokens

        assert await cached() == 0
        assert await cached() >= 160
        blocks = service.engine.stats().cached_blocks
        assert (await service.admin.FlushCache(pb.FlushCacheRequest())).flushed_blocks == blocks > 0
        assert service.engine.stats().cached_blocks == 0
        assert await cached() == 0
        assert await cached() >= 160

    async def test_a_flush_costs_a_running_request_nothing(self, start_service, new_reading):
        service = await start_service(slow(0.001), admin_listen=ANY_PORT)
        stream = service.generation.Generate(iter([pb.GenerateRequest(start=start(max_tokens=200, text="x" * 200))]))
        reading = await new_reading().read_until(stream, lambda r: r.outcomes[1].deltas > 0)
        for _ in range(5):
            await service.admin.FlushCache(pb.FlushCacheRequest())
        await reading.read(stream)
        assert reading.outcomes[1].text == "a" * 200
