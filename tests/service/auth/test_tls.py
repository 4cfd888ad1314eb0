"""Transport security: who gets a connection, and certificates that change while calls go on."""

import asyncio
import ssl
from contextlib import asynccontextmanager
from itertools import count

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients import AsyncClient, Tls, Unreachable
from penstock.clients.host.reloaded_files import FileError, TooEarly
from penstock.service.auth.tls import ServerTls

ANY_PORT = "127.0.0.1:0"


class Mounted:
    """A folder of certificates as Kubernetes mounts it: links to links, all of them changed at once."""

    def __init__(self, folder):
        self._folder = folder
        self._version = count()
        self.paths = [folder / name for name in ("tls.crt", "tls.key", "ca.crt")]

    def put(self, *contents):
        version = self._folder / f"..{next(self._version)}"
        version.mkdir()
        for path, content in zip(self.paths, contents, strict=True):
            (version / path.name).write_bytes(content)
            if not path.is_symlink():
                path.symlink_to(f"..data/{path.name}")
        (self._folder / "..new").symlink_to(version.name)
        (self._folder / "..new").replace(self._folder / "..data")


@pytest.fixture(scope="module")
def authority(new_authority):
    return new_authority("our authority")


@pytest.fixture(scope="module")
def stranger(new_authority):
    return new_authority("another authority")


@pytest.fixture
def mounted(tmp_path, authority):
    mounted = Mounted(tmp_path / "mounted")
    (tmp_path / "mounted").mkdir()
    mounted.put(*authority.issue("first"), authority.pem)
    return mounted


@pytest.fixture
def tls_of(tmp_path):
    """What a client has, from PEM."""

    def tls_of(ca, chain=None, key=None):
        paths = []
        for name, content in (("ca", ca), ("client.crt", chain), ("client.key", key)):
            if content is not None:
                (tmp_path / name).write_bytes(content)
            paths.append(None if content is None else tmp_path / name)
        return Tls(*paths)

    return tls_of


async def greet(target, tls):
    async with AsyncClient(target, tls=tls) as client:
        return (await client.complete("hi", max_tokens=2)).text


def load(tmp_path, chain, key, ca=None):
    paths = [tmp_path / name for name in ("chain", "key", "ca")]
    for path, content in zip(paths, (chain, key, ca), strict=True):
        if content is not None:
            path.write_bytes(content)
    return ServerTls(paths[0], paths[1], None if ca is None else paths[2])


async def until(condition):
    """Until a coroutine function says so."""
    for _ in range(6000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it was never so")


class TestConnections:
    """Who gets one."""

    async def test_only_with_tls(self, start_service, mounted, authority, tls_of):
        service = await start_service(tls=ServerTls(*mounted.paths[:2]))
        assert len(await greet(service.target, tls_of(authority.pem))) == 2
        with pytest.raises(Unreachable):
            await greet(service.target, None)

    async def test_a_client_that_trusts_others_goes_away(self, start_service, mounted, stranger, tls_of):
        service = await start_service(tls=ServerTls(*mounted.paths[:2]))
        with pytest.raises(Unreachable):
            await greet(service.target, tls_of(stranger.pem))

    async def test_mutual_tls_wants_a_certificate_of_the_right_authority(
        self, start_service, mounted, authority, stranger, tls_of
    ):
        service = await start_service(tls=ServerTls(*mounted.paths))
        assert len(await greet(service.target, tls_of(authority.pem, *authority.issue("client")))) == 2
        for tls in (tls_of(authority.pem), tls_of(authority.pem, *stranger.issue("client")), None):
            with pytest.raises(Unreachable):
                await greet(service.target, tls)

    async def test_the_administration_on_loopback_and_unix_sockets_have_none(self, start_service, mounted, tmp_path):
        service = await start_service(tls=ServerTls(*mounted.paths), admin_listen=ANY_PORT)
        health = health_pb2_grpc.HealthStub(service.admin_channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        path = f"unix:{tmp_path}/socket"
        service = await start_service(tls=ServerTls(*mounted.paths), listen=path)
        assert len(await greet(path, None)) == 2

    async def test_the_administration_has_it_where_others_can_reach_it(
        self, start_service, mounted, authority, tmp_path, load_keys
    ):
        (tmp_path / "keys").write_text(f"sha256:{'0' * 64} operators admin\n")
        keys = load_keys(tmp_path / "keys")
        tls = ServerTls(*mounted.paths)
        service = await start_service(tls=tls, admin_listen="0.0.0.0:0", authenticator=keys)
        port = service.server.admin_target.rpartition(":")[2]
        chain, key = authority.issue("client")
        credentials = grpc.ssl_channel_credentials(authority.pem, key, chain)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=120)
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120)


class TestFiles:
    """What is wrong with them is said in one line, without a key's content."""

    @pytest.mark.parametrize(
        ("make", "problem"),
        [
            (lambda ours, other: (b"nonsense", ours[1]), "--tls-cert .*chain: holds no certificate in PEM"),
            (lambda ours, other: (b"", ours[1]), "--tls-cert .*chain: holds no certificate in PEM"),
            (lambda ours, other: (ours[0][:200], ours[1]), "--tls-cert .*chain: holds no certificate in PEM"),
            (lambda ours, other: (ours[0], b"nonsense"), "--tls-key .*key: holds no private key in PEM"),
            (lambda ours, other: (ours[0], ours[1][:100]), "--tls-key .*key: holds no private key in PEM"),
            (lambda ours, other: (ours[0], other[1]), "--tls-key .*key: is not the key of the first certificate in"),
            (lambda ours, other: (*ours, b"nonsense"), "--tls-client-ca .*ca: holds no certificate in PEM"),
        ],
    )
    def test_what_does_not_fit_is_named(self, tmp_path, authority, make, problem):
        with pytest.raises(FileError, match=f"^{problem}"):
            load(tmp_path, *make(authority.issue(), authority.issue()))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileError, match=r"^--tls-cert .*none: cannot be read \(No such file or directory\)"):
            ServerTls(tmp_path / "none", tmp_path / "none")

    def test_an_encrypted_key_is_no_use(self, tmp_path, authority):
        key = ec.generate_private_key(ec.SECP256R1())
        chain, _ = authority.issue(key=key)
        encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        with pytest.raises(FileError, match=r"--tls-key .*: is encrypted; give it without a passphrase"):
            load(tmp_path, chain, encrypted)

    def test_keys_that_browsers_and_grpc_do_not_take(self, tmp_path, authority):
        with pytest.raises(FileError, match="has a type that TLS clients do not accept; use RSA, or EC"):
            load(tmp_path, *authority.issue(key=ed25519.Ed25519PrivateKey.generate()))
        assert load(tmp_path, *authority.issue(key=rsa.generate_private_key(65537, 2048))).credentials()

    def test_the_time_must_be_right(self, tmp_path, authority):
        with pytest.raises(FileError, match=r"--tls-cert .*: expired on 20\d\d-\d\d-\d\d \d\d:\d\d UTC; get a new"):
            load(tmp_path, *authority.issue(begin_h=-2, end_h=-1))
        with pytest.raises(TooEarly, match=r"--tls-cert .*: is not valid before .* UTC; give one that is valid now"):
            load(tmp_path, *authority.issue(begin_h=1, end_h=2))


@asynccontextmanager
async def calls(target, tls, rate):
    """Calls at a rate a second, every second one of them by a connection of its own; yields those that are done, and
    fails where one failed."""
    done, pending = [], set()

    async def call(client):
        await client.complete("hi", max_tokens=2)
        done.append(True)

    async def call_anew():
        await greet(target, tls)
        done.append(True)

    async def send():
        for number in count():
            pending.add(asyncio.create_task(call_anew() if number % 2 else call(client)))
            await asyncio.sleep(1 / rate)

    async with AsyncClient(target, tls=tls) as client:
        sender = asyncio.create_task(send())
        try:
            yield done
        finally:
            sender.cancel()
            results = await asyncio.gather(*pending, return_exceptions=True)
    assert [result for result in results if result is not None] == []


class TestRotation:
    """Certificates change under load."""

    async def rotate(self, start_service, mounted, authority, tls_of, *, mutual, num_rotations, num_calls, rate):
        """Each rotation is in use before the next one; returns how many calls there were, none of which failed."""
        paths = mounted.paths if mutual else mounted.paths[:2]
        tls = ServerTls(*paths)
        service = await start_service(tls=tls, watched=[tls.files], check_interval_s=0.02)
        client = tls_of(authority.pem, *(authority.issue("client") if mutual else ()))
        async with calls(service.target, client, rate) as done:
            for number in range(num_rotations):
                key = rsa.generate_private_key(65537, 2048) if number % 2 else None
                mounted.put(*authority.issue(f"rotation {number}", key), authority.pem)
                await until(lambda name=f"rotation {number}": is_shown(service.target, client, name))
            await until(lambda: asyncio.sleep(0, len(done) >= num_calls))
        return len(done)

    @pytest.mark.parametrize("mutual", [False, True])
    async def test_no_call_fails(self, start_service, mounted, authority, tls_of, mutual):
        sizes = {"num_rotations": 4, "num_calls": 100, "rate": 100}
        assert await self.rotate(start_service, mounted, authority, tls_of, mutual=mutual, **sizes) >= 100

    @pytest.mark.soak
    @pytest.mark.parametrize("mutual", [False, True])
    async def test_no_call_fails_for_many_seconds(self, start_service, mounted, authority, tls_of, mutual):
        sizes = {"num_rotations": 50, "num_calls": 2000, "rate": 100}
        assert await self.rotate(start_service, mounted, authority, tls_of, mutual=mutual, **sizes) >= 2000

    async def test_a_broken_new_certificate_is_logged_once_and_the_old_one_stays(
        self, start_service, mounted, authority, tls_of, caplog
    ):
        tls = ServerTls(*mounted.paths)
        service = await start_service(tls=tls, watched=[tls.files], check_interval_s=0.01)
        client = tls_of(authority.pem, *authority.issue("client"))
        chain, _ = authority.issue("new")
        _, other_key = authority.issue("other")
        async with calls(service.target, client, 100) as done:
            mounted.put(chain, other_key, authority.pem)
            await until(lambda: asyncio.sleep(0, len(done) >= 50 and "stays in use" in caplog.text))
            assert await is_shown(service.target, client, "first")
        [told] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert told.startswith(f"--tls-key {mounted.paths[1]}: is not the key of the first certificate")
        assert told.endswith("; the previous content stays in use")
        assert "PRIVATE KEY" not in told
        mounted.put(*authority.issue("third"), authority.pem)
        await until(lambda: is_shown(service.target, client, "third"))

    async def test_a_new_ca_applies_only_to_new_connections(self, start_service, mounted, authority, stranger, tls_of):
        tls = ServerTls(*mounted.paths)
        service = await start_service(tls=tls, watched=[tls.files], check_interval_s=0.01)
        client = tls_of(authority.pem, *authority.issue("client"))
        async with AsyncClient(service.target, tls=client) as old:
            await old.complete("hi", max_tokens=2)
            mounted.put(*authority.issue("next"), stranger.pem)
            async with asyncio.timeout(120):
                while True:
                    try:
                        await greet(service.target, client)
                    except Unreachable:
                        break
            assert len((await old.complete("hi", max_tokens=2)).text) == 2
        client = tls_of(authority.pem, *stranger.issue("client"))
        assert len(await greet(service.target, client)) == 2


async def is_shown(target, tls, name):
    """Whether a new connection is shown the certificate of that name."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        return name.encode() in writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
