"""Envoy in front of a service of the contract: deadlines, cancellation, TLS, idle streams, JSON and gRPC-Web through
the filters in docs/grpc.md, and broken replicas."""

import asyncio
import datetime
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from fake_service import FakeService
from proxies.envoy import Config, check_often, running_envoy
from proxies.replicas import replicas
from waiting import until
from wire.http_get import plain_client

import penstock.v1 as pb
from penstock.clients import AsyncClient
from penstock.clients.channel import Tls
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

ROOT = Path(__file__).parents[2]
ENDLESS = pb.SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEMO))


@pytest.fixture
def envoy(find_program: Callable[[str], str]) -> str:
    return find_program("envoy")


def manager_of(config: Config) -> Config:
    """Returns the connection manager of the only listener."""
    (listener,) = config["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (manager,) = chain["filters"]
    settings: Config = manager["typed_config"]
    return settings


def with_documented_filters(config: Config) -> None:
    """Adds the filters of docs/grpc.md before the router."""
    page = (ROOT / "docs/grpc.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    filters = [each for block in blocks for each in block["http_filters"]]
    assert [each["name"].rpartition(".")[2] for each in filters] == ["grpc_json_transcoder", "grpc_web"]
    filters[0]["typed_config"]["proto_descriptor"] = str(ROOT / "protos/penstock/v1/descriptor.binpb")
    manager = manager_of(config)
    manager["codec_type"] = "AUTO"
    ((route,),) = (host["routes"] for host in manager["route_config"]["virtual_hosts"])
    route["match"] = {"prefix": "/"}
    manager["http_filters"] = [*reversed(filters), *manager["http_filters"]]


def certificate(folder: Path) -> tuple[Path, Path]:
    """Writes a self-signed certificate for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    (folder / "chain.pem").write_bytes(signed.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return folder / "chain.pem", folder / "key.pem"


async def test_a_deadline_and_a_cancellation_end_requests(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        replicas(tokenizer, 0) as (replica,),
        running_envoy(envoy, tmp_path, replica.target) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        generation = GenerationServiceStub(channel)
        start = pb.GenerationStart(ref=1, text="hi", sampling=ENDLESS)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generation.Complete(pb.CompleteRequest(start=start), timeout=0.5)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: replica.engine.stats().finished == 1)
        stream: Any = generation.Generate()
        await stream.write(pb.GenerateRequest(start=start))
        while not (await stream.read()).deltas:
            pass
        stream.cancel()
        await until(lambda: replica.engine.stats().requests == 0)


async def test_a_stream_of_many_requests_goes_both_ways(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each request is sent when the one before has ended."""
    async with (
        replicas(tokenizer, 0) as (replica,),
        running_envoy(envoy, tmp_path, replica.target) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        stream: Any = GenerationServiceStub(channel).Generate()
        for ref in (1, 2, 3):
            sampling = pb.SamplingParams(max_tokens=ref, ignore_eos=True)
            await stream.write(pb.GenerateRequest(start=pb.GenerationStart(ref=ref, text="hi", sampling=sampling)))
            while not (message := await stream.read()).finished:
                pass
            assert [(each.ref, each.usage.output_tokens) for each in message.finished] == [(ref, ref)]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


async def test_an_idle_stream_outlives_every_timeout(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Simulates an idle hour, with every time divided by at least 3,600: pings from both sides, Envoy's limit for
    silent streams, heartbeats. The stream gets no GOAWAY, and still works."""

    def short(config: Config) -> None:
        manager = manager_of(config)
        manager["stream_idle_timeout"] = "1s"
        manager["http2_protocol_options"]["connection_keepalive"] = {"interval": "0.1s", "timeout": "5s"}
        options = config["static_resources"]["clusters"][0]["typed_extension_protocol_options"]
        http2 = options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["explicit_http_config"]
        http2["http2_protocol_options"]["connection_keepalive"] = {"interval": "1s", "timeout": "5s"}

    options = (("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0))
    async with (
        replicas(tokenizer, 0, heartbeat_s=0.2) as (replica,),
        running_envoy(envoy, tmp_path, replica.target, change=short) as proxy,
        grpc.aio.insecure_channel(proxy.target, options=options) as channel,
    ):
        stream: Any = GenerationServiceStub(channel).Generate()
        num_heartbeats = 0
        while num_heartbeats < 8:
            num_heartbeats += (await stream.read()).HasField("heartbeat")
        sampling = pb.SamplingParams(max_tokens=1, ignore_eos=True)
        await stream.write(pb.GenerateRequest(start=pb.GenerationStart(ref=1, text="hi", sampling=sampling)))
        await stream.done_writing()
        while (message := await stream.read()) is not grpc.aio.EOF:
            num_heartbeats += len(message.finished)
        assert await stream.code() is grpc.StatusCode.OK
        stats = proxy.ask("stats")["stats"]
        received = {each["name"]: each["value"] for each in stats if "goaway" in each.get("name", "")}
        assert sum(received.values()) == 0, received


async def test_json_in_and_out(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        replicas(tokenizer, 0) as (replica,),
        running_envoy(envoy, tmp_path, replica.target, change=with_documented_filters) as proxy,
        plain_client(f"http://{proxy.target}") as http,
    ):
        model = await http.get("/penstock/v1/model")
        assert model.json()["model"]["name"] == "fake"
        start: dict[str, Any] = {"text": "hi", "sampling": {"maxTokens": 3, "ignoreEos": True}}
        whole = await http.post("/penstock/v1/generation:complete", json={"start": start})
        assert whole.json()["finished"]["usage"]["outputTokens"] == 3
        start["sampling"]["maxTokens"] = 0
        refused = await http.post("/penstock/v1/generation:complete", json={"start": start})
        assert refused.status_code == 400
        details = {each["@type"].rpartition(".")[2]: each for each in refused.json()["details"]}
        assert details["BadRequest"]["fieldViolations"][0]["field"] == "sampling.max_tokens"
        assert details["ErrorInfo"]["domain"] == "penstock.dev"


async def test_grpc_web(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        replicas(tokenizer, 0) as (replica,),
        running_envoy(envoy, tmp_path, replica.target, change=with_documented_filters) as proxy,
        plain_client(f"http://{proxy.target}") as http,
    ):
        sampling = pb.SamplingParams(max_tokens=3, ignore_eos=True)
        request = pb.GenerateOneRequest(start=pb.GenerationStart(text="hi", sampling=sampling)).SerializeToString()
        response = await http.post(
            "/penstock.v1.GenerationService/GenerateOne",
            content=b"\0" + struct.pack(">I", len(request)) + request,
            headers={"content-type": "application/grpc-web+proto"},
        )
        frames, rest = [], response.content
        while rest:
            size = int.from_bytes(rest[1:5])
            frames.append((rest[0], rest[5 : 5 + size]))
            rest = rest[5 + size :]
        messages = [pb.GenerateOneResponse.FromString(raw) for flags, raw in frames if not flags]
        assert messages[-1].finished.usage.output_tokens == 3
        trailers = frames[-1][1]
        assert frames[-1][0] == 0x80
        assert b"grpc-status:0" in trailers
        assert b"endpoint-load-metrics-bin:" in trailers


async def test_tls_of_the_listener(envoy: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    chain, key = certificate(tmp_path)

    def secure(config: Config) -> None:
        (listener,) = config["static_resources"]["listeners"]
        pair = {"certificate_chain": {"filename": str(chain)}, "private_key": {"filename": str(key)}}
        listener["filter_chains"][0]["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"], "tls_certificates": [pair]},
            },
        }

    async with (
        replicas(tokenizer, 0) as (replica,),
        running_envoy(envoy, tmp_path, replica.target, change=secure) as proxy,
        AsyncClient(proxy.target, tls=Tls(ca=chain, server_name="localhost")) as client,
    ):
        assert (await client.complete("hi", max_tokens=3)).finished.usage.output_tokens <= 3


class Broken(FakeService):
    """A service that is healthy, but refuses every call."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    async def GetModel(self, request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        self.refused += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


async def test_a_broken_replica_is_left_out(envoy: str, tmp_path: Path) -> None:
    broken = Broken()
    async with (
        broken.serving(),
        FakeService().serving() as ready,
        running_envoy(envoy, tmp_path, broken.target, ready.target, change=check_often) as proxy,
        AsyncClient(proxy.target) as client,
    ):
        num_well = 0
        while num_well < 10:  # Envoy batches such changes
            refused = broken.refused
            assert (await client.model()).name == "fake"
            num_well = num_well + 1 if broken.refused == refused else 0
        assert await asyncio.to_thread(proxy.healthy) == {ready.target}
