"""A service on a real socket, over a fake worker and a tokenizer whose ids are bytes: fast, and each output is
known."""

import datetime
import ipaddress
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import tokenizers
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from google.rpc import error_details_pb2, status_pb2
from tokenizers import decoders, models, pre_tokenizers
from wire.frames import Stream

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.admin_pb2_grpc import AdminServiceStub
from penstock.v1.classification_pb2_grpc import ClassificationServiceStub
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.model_pb2_grpc import ModelServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_byte_tokenizer(directory: Path, template: str | list[tuple[str, str]] | None = TEMPLATE) -> Path:
    """A byte-level tokenizer without merges: id i is byte i; 256 ends an output, 257 begins a turn. ``template``: one,
    or several with their names."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>", "<|turn|>"])
    directory.mkdir(parents=True, exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    if isinstance(template, list):
        config["chat_template"] = [{"name": name, "template": source} for name, source in template]
    elif template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., Path]:
    """Writes a byte tokenizer with a chat template of the test's own."""
    return write_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the byte tokenizer."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_path: Path) -> Tokenizer:
    """Its ids are bytes."""
    return Tokenizer(byte_tokenizer_path)


def next_letter(history: Sequence[int], sampling: SamplingParams) -> int:
    """a, b, c ... by the length of the history."""
    return ord("a") + len(history) % 26


@dataclass
class Service:
    """A running service, and how to reach it."""

    server: Server
    engine: Engine
    executor: FakeExecutor
    target: str
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    """To the administration, where the test asked for one."""

    def __post_init__(self) -> None:
        self.classification = ClassificationServiceStub(self.channel)
        self.embedding = EmbeddingServiceStub(self.channel)
        self.generation = GenerationServiceStub(self.channel)
        self.model = ModelServiceStub(self.channel)
        self.tokenizer = TokenizerServiceStub(self.channel)
        self.admin = AdminServiceStub(self.admin_channel)

    @property
    def blocks_in_use(self) -> float:
        """The share of blocks that requests hold."""
        return self.engine.stats().kv_usage


StartService = Callable[..., Awaitable[Service]]

CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
"""A window that grows with the machine's delays may take all that a client does not read."""


@pytest.fixture
async def start_service(byte_tokenizer: Tokenizer) -> AsyncIterator[StartService]:
    """Starts services; they are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(
            executor: FakeExecutor | None = None,
            scheduler: SchedulerConfig | None = None,
            tokenizer: Tokenizer | None = None,
            engine: Engine | None = None,
            **config: Any,
        ) -> Service:
            executor = executor or FakeExecutor(vocab_size=258, next_token=next_letter)
            scheduler = scheduler or SchedulerConfig()
            engine = engine or Engine(executor, scheduler)
            settings: dict[str, Any] = {"model_name": "bytes", "listen": "127.0.0.1:0", "scheduler": scheduler} | config
            server = Server(ServerConfig(**settings), engine, lambda: tokenizer or byte_tokenizer)
            target = await server.start()
            stack.push_async_callback(server.stop)
            channels = []
            for where in (target, server.admin_target or "unix:/nowhere"):
                channels.append(grpc.aio.insecure_channel(where, options=CHANNEL_OPTIONS))
                stack.push_async_callback(channels[-1].close)
            return Service(server, engine, executor, target, *channels)

        yield start


@dataclass
class Outcome:
    """What one request brought."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    accepted: list[pb.Accepted] = field(default_factory=list)
    finished: list[pb.Finished] = field(default_factory=list)
    deltas: int = 0


@dataclass
class Reading:
    """What one stream brought."""

    outcomes: dict[int, Outcome] = field(default_factory=lambda: defaultdict(Outcome))
    messages: list[pb.GenerateResponse] = field(default_factory=list)

    def take(self, message: pb.GenerateResponse) -> None:
        """Applies a message, in the order of its fields."""
        self.messages.append(message)
        for accepted in message.accepted:
            self.outcomes[accepted.ref].accepted.append(accepted)
        for delta in message.deltas:
            outcome = self.outcomes[delta.ref]
            assert outcome.accepted, "output before accepted"
            assert not outcome.finished, "output after the end"
            outcome.text += delta.text
            outcome.token_ids += delta.token_ids
            outcome.deltas += 1
        for finished in message.finished:
            self.outcomes[finished.ref].finished.append(finished)

    async def read(self, call: Any) -> "Reading":
        """Reads the stream to its end; raises grpc.aio.AioRpcError."""
        while (message := await call.read()) is not grpc.aio.EOF:
            self.take(message)
        code = await call.code()
        assert code is grpc.StatusCode.OK, code
        return self

    async def read_until(self, call: Any, enough: Callable[["Reading"], bool]) -> "Reading":
        """Reads as far as ``enough`` wants."""
        while not enough(self):
            message = await call.read()
            assert message is not grpc.aio.EOF, "the stream ended"
            self.take(message)
        return self


@pytest.fixture
def new_reading() -> type[Reading]:
    """Collects what streams bring."""
    return Reading


Details = dict[str, Any]


@pytest.fixture
def details_of() -> Callable[[Any], Details]:
    """The details of a google.rpc.Status, or of the AioRpcError that carries one, by the names of their types."""

    def details_of(source: Any) -> Details:
        if isinstance(source, grpc.aio.AioRpcError):
            trailing = dict(source.trailing_metadata() or ())
            source = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        found: Details = {}
        for detail in source.details:
            name = detail.TypeName().rpartition(".")[2]
            message = getattr(pb if detail.TypeName().startswith("penstock") else error_details_pb2, name)()
            detail.Unpack(message)
            found[message.DESCRIPTOR.name] = message
        return found

    return details_of


@pytest.fixture
def open_frames(
    start_service: StartService, new_reading: type[Reading], details_of: Callable[[Any], Details]
) -> Callable[..., Awaitable[Stream]]:
    """Starts a service and opens a Generate stream to it."""

    async def open_frames(executor: FakeExecutor | None = None, *arguments: Any, **config: Any) -> Stream:
        service = await start_service(executor or FakeExecutor(vocab_size=258), *arguments, **config)
        return Stream(service, new_reading(), details_of)

    return open_frames


class Issuer:
    """An identity provider: a key of each kind, and the tokens that it signs."""

    def __init__(self) -> None:
        self.private: dict[str, Any] = {
            "rsa": rsa.generate_private_key(65537, 2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
            "ed": ed25519.Ed25519PrivateKey.generate(),
        }

    def jwks(self) -> dict[str, Any]:
        """What it publishes."""
        to_jwk: dict[str, Any] = {
            "rsa": jwt.algorithms.RSAAlgorithm.to_jwk,
            "ec": jwt.algorithms.ECAlgorithm.to_jwk,
            "ed": jwt.algorithms.OKPAlgorithm.to_jwk,
        }
        public = {kid: json.loads(to_jwk[kid](key.public_key())) for kid, key in self.private.items()}
        return {"keys": [{**jwk, "kid": kid, "use": "sig"} for kid, jwk in public.items()]}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Good ones, but for the changes; None leaves a claim out."""
        claims = {"iss": "https://id.example", "aud": "penstock", "exp": time.time() + 300, "tenant": "acme"} | changes
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, kid: str = "ed", headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """Signed by a key."""
        algorithm = {"rsa": "RS256", "ec": "ES256", "ed": "EdDSA"}[kid]
        claims = self.claims(**changes)
        return jwt.encode(claims, self.private[kid], algorithm=algorithm, headers={"kid": kid} | (headers or {}))


@pytest.fixture(scope="session")
def issuer() -> Issuer:
    """The one that is trusted."""
    return Issuer()


@pytest.fixture(scope="session")
def other_issuer() -> Issuer:
    """Another one, whose keys have the same ids."""
    return Issuer()


class Authority:
    """Signs certificates that are good for a day, from an hour ago on."""

    def __init__(self, name: str) -> None:
        self._now = datetime.datetime.now(datetime.UTC)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        is_authority = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(
            key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self.pem = self._sign(self._name, self._key.public_key(), [is_authority, usage], -1, 24)
        """Its own certificate."""

    def issue(
        self, name: str = "penstock.test", key: Any = None, begin_h: float = -1, end_h: float = 24
    ) -> tuple[bytes, bytes]:
        """A chain for this machine and its key, in PEM; good from and to so many hours from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        chain = self._sign(subject, key.public_key(), [names], begin_h, end_h)
        return chain, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def _sign(
        self, subject: x509.Name, key: Any, extensions: list[x509.ExtensionType], begin_h: float, end_h: float
    ) -> bytes:
        """A certificate that passes Python 3.13's strict checks."""
        begin, end = (self._now + datetime.timedelta(hours=hours) for hours in (begin_h, end_h))
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number(), begin, end)
        for extension in extensions:
            is_critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical=is_critical)
        for identifier in (
            x509.SubjectKeyIdentifier.from_public_key(key),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
        ):
            builder = builder.add_extension(identifier, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(Encoding.PEM)


@pytest.fixture(scope="session")
def new_authority() -> type[Authority]:
    """Each has a key of its own."""
    return Authority
