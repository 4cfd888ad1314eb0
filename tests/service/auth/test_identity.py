"""Keys, tenants, and who may call what."""

import hashlib
import subprocess
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import penstock.v1 as pb
from penstock.clients.host.reloaded_files import FileError
from penstock.service.auth.identity import ACCESS, Principal
from penstock.service.errors import ServiceError

KEY, GATEWAY_KEY = "k" * 40, "g" * 40


def hash_key(key):
    """As the remedy for a bad key file makes it."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


@pytest.fixture
def keys(tmp_path, load_keys):
    path = tmp_path / "keys"
    path.write_text(
        f"# two callers\n\n{hash_key(KEY)} acme  # the first\n{hash_key(GATEWAY_KEY)} gateway act-for-others\n"
    )
    return load_keys(path)


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


def start(**fields):
    return pb.GenerateOneRequest(
        start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=1), **fields)
    )


def test_keys_are_known_by_their_hashes(keys):
    assert keys.authenticate(bearer(KEY)) == Principal("acme")
    assert keys.authenticate(bearer(GATEWAY_KEY)) == Principal("gateway", may_act_for_others=True)


def test_a_key_may_have_several_rights_in_any_order(tmp_path, load_keys):
    path = tmp_path / "keys"
    for rights, principal in (
        ("admin", Principal("acme", may_administer=True)),
        ("admin act-for-others", Principal("acme", may_act_for_others=True, may_administer=True)),
        ("act-for-others admin", Principal("acme", may_act_for_others=True, may_administer=True)),
    ):
        path.write_text(f"{hash_key(KEY)} acme {rights}\n")
        assert load_keys(path).authenticate(bearer(KEY)) == principal


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer(""),
        bearer("x" * 40),
        bearer(KEY + "x"),
        bearer("x" * 5000),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (("authorization", hash_key(KEY)),),
        bearer(hash_key(KEY)),
        bearer(KEY) + bearer(KEY),
        (("x-api-key", KEY),),
    ],
)
def test_any_other_metadata_is_unauthenticated(keys, metadata):
    with pytest.raises(ServiceError) as error:
        keys.authenticate(metadata)
    assert error.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert "kkk" not in error.value.message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        (f"{KEY} acme", r":1: the first word .*; echo \"sha256:\$\(printf %s \"\$KEY\" \| sha256sum"),
        (f"sha256:{KEY} acme", ":1: the first word"),
        (f"{hash_key(KEY)}", ":1: the second word"),
        (f"\n{hash_key(KEY)} a/b", ":2: the second word"),
        (f"{hash_key(KEY)} {'a' * 65}", ":1: the second word"),
        (f"{hash_key(KEY)} acme administrator", ":1: after the tenant"),
        (f"{hash_key(KEY)} acme admin admin", ":1: after the tenant"),
        (f"{hash_key(KEY)} acme act-for-others now", ":1: after the tenant"),
        (f"{hash_key(KEY)} acme\n{hash_key(KEY)} other", ":2: the key is in the file already"),
    ],
)
def test_a_bad_key_file_is_named_by_line_and_shows_no_key(tmp_path, load_keys, text, named):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(FileError, match=named) as error:
        load_keys(path)
    assert str(error.value).startswith(f"--api-keys-file {path}:")
    assert KEY not in str(error.value)


def test_a_missing_key_file_is_named(tmp_path, load_keys):
    with pytest.raises(
        FileError, match=r"^--api-keys-file .*missing-file: cannot be read \(No such file or directory\)"
    ):
        load_keys(tmp_path / "missing-file")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(FileError, match=r"^--api-keys-file .*bytes: is not UTF-8 text"):
        load_keys(tmp_path / "bytes")


def test_the_line_that_an_error_shows_makes_a_key(tmp_path, load_keys):
    (tmp_path / "keys").write_text("nonsense")
    with pytest.raises(FileError) as error:
        load_keys(tmp_path / "keys")
    command = str(error.value).partition("; ")[2].removesuffix(" makes a line")
    made = subprocess.run(["bash", "-c", command], env={"KEY": KEY}, capture_output=True, text=True, check=True)
    (tmp_path / "keys").write_text(made.stdout)
    assert load_keys(tmp_path / "keys").authenticate(bearer(KEY)) == Principal("some-tenant")


async def test_callers_without_a_valid_key_are_refused(start_service, keys):
    service = await start_service(authenticator=keys)
    for metadata in (None, bearer("wrong")):
        for call in (
            service.generation.Complete(pb.CompleteRequest(), metadata=metadata),
            service.model.GetModel(pb.GetModelRequest(), metadata=metadata),
            service.tokenizer.Tokenize(pb.TokenizeRequest(), metadata=metadata),
            service.generation.GenerateOne(start(), metadata=metadata).read(),
            service.generation.Generate(metadata=metadata).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await service.generation.Complete(pb.CompleteRequest(start=start().start), metadata=bearer(KEY))).choices


async def test_nobody_is_turned_away_before_the_message_is_looked_at(start_service, keys):
    service = await start_service(authenticator=keys)
    complete = service.channel.unary_unary("/penstock.v1.GenerationService/Complete")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(b"\xff\xff\xff")
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(b"\xff\xff\xff", metadata=bearer(KEY))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_reflection_are_open(start_service, keys):
    service = await start_service(authenticator=keys)
    health = health_pb2_grpc.HealthStub(service.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [found.name for found in (await call.read()).list_services_response.service]
    assert "penstock.v1.GenerationService" in names


async def test_only_a_gateway_names_tenants(start_service, keys, details_of):
    service = await start_service(authenticator=keys)

    async def complete(key, tenant):
        request = pb.CompleteRequest(start=start(tenant=tenant).start)
        return await service.generation.Complete(request, metadata=bearer(key))

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await complete(KEY, "other")
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert details_of(error.value)["ErrorInfo"].reason == "TENANT_DENIED"
    assert await complete(KEY, "acme")
    assert await complete(GATEWAY_KEY, "other")


async def test_tenants_share_no_cache_and_one_tenant_does(start_service, keys):
    service = await start_service(authenticator=keys)

    async def cached(key, tenant=""):
        request = pb.CompleteRequest(
            start=pb.GenerationStart(text="x" * 200, tenant=tenant, sampling=pb.SamplingParams(max_tokens=1))
        )
        return (await service.generation.Complete(request, metadata=bearer(key))).finished.usage.cached_tokens

    assert await cached(KEY) == 0
    assert await cached(GATEWAY_KEY) == 0
    assert await cached(KEY) > 0
    assert await cached(GATEWAY_KEY, tenant="acme") > 0
    assert await cached(GATEWAY_KEY, tenant="third") == 0


async def test_callers_cannot_name_a_tenant_without_a_key_file(start_service):
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.generation.Complete(pb.CompleteRequest(start=start(tenant="other").start))
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert await service.generation.Complete(pb.CompleteRequest(start=start(tenant="default").start))


async def test_a_method_without_a_rule_is_denied(start_service, monkeypatch):
    monkeypatch.delitem(ACCESS, "/penstock.v1.ModelService/GetModel")
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.model.GetModel(pb.GetModelRequest())
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
