"""Every method against every kind of credentials, and keys, tokens and tenants that change while streams are open.

The methods come from the contract's own descriptors: one that is new is in the matrix, and fails it until it has a
rule.
"""

import hashlib
import importlib
import json
import pkgutil
import time

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

import penstock.v1
import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import ACCESS, Access
from penstock.service.auth.operator_files import OperatorFiles
from penstock.service.config.contracts import CONTRACTS
from penstock.service.config.serve_config import ServeConfig
from penstock.service.requests.generate import RequestBuilder
from penstock.v1 import orca

KEYS = {"acme": "a" * 40, "zenith": "z" * 40, "operators": "o" * 40}
RIGHTS = {"operators": " admin"}
DENIALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
MALFORMED = b"\xff\xff\xff"


def described_methods():
    """Every method of the contract, of those of other engines, of health, reflection and load reports, by its path."""
    names = [module.name for module in pkgutil.iter_modules(penstock.v1.__path__) if module.name.endswith("_pb2")]
    files = [importlib.import_module(f"penstock.v1.{name}").DESCRIPTOR for name in names]
    files += [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR]
    files.append(orca.POOL.FindFileContainingSymbol(orca.SERVICE))
    if CONTRACTS["openengine"].is_installed:
        files.append(importlib.import_module("openengine.v1.openengine_pb2").DESCRIPTOR)
    return {
        f"/{service.full_name}/{method.name}": method
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }


METHODS = described_methods()
SERVED = tuple(name for name, contract in CONTRACTS.items() if contract.is_installed)
RULES = {
    path: rule
    for path, rule in ACCESS.items()
    if not path.startswith("/openengine.") or "openengine" in SERVED  # its bindings are in no extra
}


def key_line(tenant, key):
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {tenant}{RIGHTS.get(tenant, '')}\n"


def bearer(credential):
    return (("authorization", f"Bearer {credential}"),)


@pytest.fixture
def files(tmp_path, issuer):
    """What `penstock serve` reads with keys, tokens and tenants."""
    (tmp_path / "keys").write_text("".join(key_line(tenant, key) for tenant, key in KEYS.items()))
    (tmp_path / "jwks.json").write_text(json.dumps(issuer.jwks()))
    (tmp_path / "tenants.yaml").write_text("acme: {weight: 2}\n")
    config = ServeConfig(
        api_keys_file=tmp_path / "keys",
        jwt_jwks_file=tmp_path / "jwks.json",
        jwt_issuer="https://id.example",
        jwt_audience="penstock",
        tenants_file=tmp_path / "tenants.yaml",
    )
    return OperatorFiles.load(config)


@pytest.fixture
async def service(start_service, files):
    """With both listeners, that looks at its files often."""
    return await start_service(
        FakeExecutor(vocab_size=258, seconds_per_step=0.002),
        authenticator=files.authenticator,
        tenants=files.tenants,
        watched=files.watched,
        check_interval_s=0.01,
        admin_listen="127.0.0.1:0",
        contracts=SERVED,
    )


def channels_of(service, path):
    if path.startswith("/penstock.v1.AdminService/"):
        return [service.admin_channel]
    of_callers = path.startswith(("/openengine.", "/penstock.v1.", "/vllm.", "/xds."))
    return [service.channel] if of_callers else [service.channel, service.admin_channel]


async def code_of(channel, path, metadata, body=b""):
    """What a call ends with, whatever it is; one that answers, or waits for more, is OK."""
    while True:
        call = channel.stream_stream(path)(iter([body]), metadata=metadata, timeout=120)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            if error.details() != CLIENTS_OWN:
                return error.code()
        else:
            return grpc.StatusCode.OK
        finally:
            call.cancel()


async def refusal_of(channel, path, num_messages):
    """What a call with this many messages ends with."""
    while True:
        call = channel.stream_stream(path)(iter([b""] * num_messages), metadata=bearer(KEYS["operators"]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        if error.value.details() != CLIENTS_OWN:
            return error.value


def test_every_method_has_a_rule_and_every_rule_a_method():
    # The service makes this one's descriptor from v1alpha's.
    assert set(RULES) - {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"} == set(METHODS)
    assert all(rule is Access.ADMINS for path, rule in ACCESS.items() if path.startswith("/penstock.v1.AdminService/"))
    is_open = {path for path, rule in ACCESS.items() if rule is Access.OPEN}
    assert not any(path.startswith("/penstock.") for path in is_open)
    assert {path for path in is_open if path.startswith(("/openengine.", "/vllm."))} == {
        "/openengine.v1.Control/Health",
        "/vllm.grpc.engine.VllmEngine/HealthCheck",
    }


BAD = {
    "none": lambda issuer, other: [()],
    "malformed": lambda issuer, other: [
        (("authorization", KEYS["operators"]),),
        (("authorization", f"Basic {KEYS['operators']}"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer"),),
        bearer(KEYS["operators"]) * 2,
        (("x-api-key", KEYS["operators"]),),
        (("authorization-bin", b"Bearer " + KEYS["operators"].encode()),),
        bearer("a.b.c"),
    ],
    "wrong": lambda issuer, other: [
        bearer("w" * 40),
        bearer(KEYS["operators"] + "x"),
        bearer(other.token(scope="penstock:admin")),
        bearer(issuer.token(scope="penstock:admin")[:-6] + "AAAAAA"),
    ],
    "expired": lambda issuer, other: [bearer(issuer.token(scope="penstock:admin", exp=time.time() - 3600))],
    "not yet valid": lambda issuer, other: [bearer(issuer.token(scope="penstock:admin", nbf=time.time() + 3600))],
    "wrong audience": lambda issuer, other: [bearer(issuer.token(scope="penstock:admin", aud="another"))],
    "wrong issuer": lambda issuer, other: [bearer(issuer.token(scope="penstock:admin", iss="https://evil.example"))],
    "no tenant": lambda issuer, other: [bearer(issuer.token(scope="penstock:admin", tenant=None))],
}

CLIENTS_OWN = "Internal error from Core"
"""grpc.aio's own, where a refusal overtakes what the call still wanted to write: the status is lost."""


class TestMatrix:
    """Every method."""

    @pytest.mark.parametrize("case", BAD)
    async def test_bad_credentials_are_unauthenticated_whatever_the_body(self, service, issuer, other_issuer, case):
        for metadata in BAD[case](issuer, other_issuer):
            for path in METHODS:
                for channel in channels_of(service, path):
                    for body in (b"", MALFORMED):
                        code = await code_of(channel, path, metadata, body)
                        if ACCESS[path] is Access.OPEN:
                            assert code not in DENIALS, (path, metadata)
                        else:
                            assert code is grpc.StatusCode.UNAUTHENTICATED, (path, metadata, body)

    @pytest.mark.parametrize("kind", ["key", "token"])
    async def test_good_ones_are_let_in_and_only_operators_administer(self, service, issuer, kind):
        tenants = bearer(KEYS["acme"] if kind == "key" else issuer.token())
        operators = bearer(KEYS["operators"] if kind == "key" else issuer.token(scope="penstock:admin"))
        for path in METHODS:
            [channel, *_] = channels_of(service, path)
            assert await code_of(channel, path, operators) not in DENIALS, path
            code = await code_of(channel, path, tenants)
            if ACCESS[path] is Access.ADMINS:
                assert code is grpc.StatusCode.PERMISSION_DENIED, path
            else:
                assert code not in DENIALS, path

    @pytest.mark.parametrize("num_messages", [0, 2, 3])
    async def test_a_method_of_one_message_takes_no_other_number(self, service, num_messages):
        """It is refused at once: a client that half-closes without a message waits for an answer."""
        paths = [path for path, method in METHODS.items() if not method.client_streaming]
        assert len(paths) > 15
        for path in paths:
            for channel in channels_of(service, path):
                error = await refusal_of(channel, path, num_messages)
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED, path
                assert "takes exactly one message" in str(error.details())

    async def test_a_malformed_body_is_an_invalid_argument_for_who_may_call(self, service):
        for path, rule in RULES.items():
            if rule is not Access.OPEN:
                [channel] = channels_of(service, path)
                code = await code_of(channel, path, bearer(KEYS["operators"]), MALFORMED)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, path

    async def test_nobody_acts_for_another_tenant(self, service):
        """Wherever a request names a tenant for whom it is."""
        naming = {path: body for path, method in METHODS.items() if (body := _naming("acme", method)) is not None}
        assert {path.rpartition("/")[2] for path in naming} >= {"Complete", "Embed", "Generate", "GenerateOne"}
        for path, body in naming.items():
            call = service.channel.stream_stream(path)(iter([body]), metadata=bearer(KEYS["zenith"]), timeout=120)
            if path.endswith("/Generate"):
                response = pb.GenerateResponse.FromString(await call.read())
                assert response.finished[0].status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
                call.cancel()
                continue
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED, path
            assert await code_of(service.channel, path, bearer(KEYS["acme"]), body) not in DENIALS, path


def _naming(tenant, method):
    """A request that names a tenant for whom it is; None for a method that has no such field."""
    if method.containing_service.name == "AdminService":
        return None
    request = method.input_type
    fields: dict[str, object] = {"ref": 1, "text": "hi"} if "start" in request.fields_by_name else {}
    if "inputs" in request.fields_by_name:
        fields = {"inputs": [{"text": "hi"}]}
    if "request_ids" in request.fields_by_name:
        fields = {"request_ids": ["R"]}
    if "tenant" in request.fields_by_name:
        named = fields | {"tenant": tenant}
    elif "start" in request.fields_by_name:
        named = {"start": fields | {"tenant": tenant}}
    else:
        return None
    return json_format.ParseDict(named, GetMessageClass(request)()).SerializeToString()


def start(text="hi", max_tokens=1):
    return pb.GenerationStart(ref=1, text=text, sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def complete(service, credential):
    """The code that a small request ends with."""
    try:
        await service.generation.Complete(pb.CompleteRequest(start=start()), metadata=bearer(credential))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def until(service, credential, code):
    for _ in range(3000):
        if await complete(service, credential) is code:
            return
    raise AssertionError(f"never became {code}")


class TestChanges:
    """Keys, tokens and tenants that change."""

    async def test_a_key_that_is_gone_begins_nothing_and_its_open_stream_goes_on(self, service, tmp_path, new_reading):
        stream = service.generation.Generate(metadata=bearer(KEYS["acme"]))
        await stream.write(pb.GenerateRequest(start=start(max_tokens=40)))
        reading = await new_reading().read_until(stream, lambda reading: reading.outcomes[1].accepted)
        (tmp_path / "keys").write_text(key_line("acme", "n" * 40))
        await until(service, KEYS["acme"], grpc.StatusCode.UNAUTHENTICATED)
        assert await complete(service, "n" * 40) is grpc.StatusCode.OK
        frame = pb.GenerateRequest(start=start())
        frame.start.ref = 2
        await stream.write(frame)
        await stream.done_writing()
        await reading.read(stream)
        assert [reading.outcomes[ref].finished[0].status.code for ref in (1, 2)] == [0, 0]

    async def test_tokens_keys_change_and_a_broken_file_keeps_the_old_ones(
        self, service, tmp_path, issuer, other_issuer, caplog
    ):
        assert await complete(service, issuer.token()) is grpc.StatusCode.OK
        (tmp_path / "jwks.json").write_text("{")
        (tmp_path / "keys").write_text("hush-hush acme\n")
        while len(caplog.records) < 2:
            assert await complete(service, issuer.token()) is grpc.StatusCode.OK
            assert await complete(service, KEYS["acme"]) is grpc.StatusCode.OK
        told = [record.getMessage() for record in caplog.records]
        assert all(text.endswith("; the previous content stays in use") for text in told)
        assert "hush" not in "".join(told)
        (tmp_path / "jwks.json").write_text(json.dumps(other_issuer.jwks()))
        await until(service, other_issuer.token(), grpc.StatusCode.OK)
        assert await complete(service, issuer.token()) is grpc.StatusCode.UNAUTHENTICATED

    async def test_a_new_tenant_rate_applies_at_once_and_refusals_give_a_delay(
        self, service, tmp_path, details_of, monkeypatch
    ):
        assert await complete(service, KEYS["acme"]) is grpc.StatusCode.OK
        (tmp_path / "tenants.yaml").write_text("acme: {requests-per-second: 0.01}\nzenith: {tokens-per-minute: 3}\n")
        await until(service, KEYS["acme"], grpc.StatusCode.RESOURCE_EXHAUSTED)
        await until(service, KEYS["zenith"], grpc.StatusCode.RESOURCE_EXHAUSTED)
        for tenant, reason, most_s in (("acme", "TENANT_RATE", 100), ("zenith", "TENANT_TOKENS", 60)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.generation.Complete(pb.CompleteRequest(start=start()), metadata=bearer(KEYS[tenant]))
            details = details_of(error.value)
            assert details["ErrorInfo"].reason == reason
            delay_ms = details["RetryInfo"].retry_delay.ToMilliseconds()
            assert 0 < delay_ms <= most_s * 1000
            assert dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"] == str(delay_ms)
        assert await complete(service, KEYS["operators"]) is grpc.StatusCode.OK
        # Nothing is spent on what is refused for its rate alone: its prompt is not even tokenized.
        monkeypatch.setattr(RequestBuilder, "prepare", lambda *_: pytest.fail("was prepared"))
        assert await complete(service, KEYS["acme"]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        config = service.engine.config
        assert config.tenants["acme"].weight == 1  # the file says it all: what it no longer names is at its default
