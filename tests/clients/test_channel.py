"""Transport security and the caller's key."""

import shutil
import subprocess

import grpc
import pytest

from penstock.clients import AsyncClient, PenstockError, Tls, Unreachable
from penstock.clients.cli import main as cli


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for penstock.test that vouches for itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=penstock.test"
    files = ["-addext", "subjectAltName=DNS:penstock.test", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return folder


@pytest.fixture
def credentials(certificate):
    """A service that wants a certificate of its callers too."""
    key, chain = ((certificate / name).read_bytes() for name in ("key.pem", "cert.pem"))
    return grpc.ssl_server_credentials([(key, chain)], root_certificates=chain, require_client_auth=True)


async def test_tls_both_ways(new_service, credentials, certificate):
    tls = Tls(certificate / "cert.pem", certificate / "cert.pem", certificate / "key.pem", "penstock.test")
    async with new_service().serving(credentials=credentials) as fake:
        async with AsyncClient(fake.target, api_key="secret", tls=tls) as client:
            assert (await client.complete("hi")).text == "hi"
        assert fake.metadata["authorization"] == "Bearer secret"


@pytest.mark.parametrize("wrong", ["name", "trust"])
async def test_another_service_is_not_talked_to(new_service, credentials, certificate, wrong):
    whole = Tls(certificate / "cert.pem", certificate / "cert.pem", certificate / "key.pem", "penstock.test")
    tls = Tls(whole.ca, whole.certificate, whole.key) if wrong == "name" else Tls(server_name="penstock.test")
    async with new_service().serving(credentials=credentials) as fake:
        async with AsyncClient(fake.target, api_key="secret", tls=tls) as client:
            with pytest.raises(Unreachable):
                await client.complete("hi")
        assert fake.streams == 0


async def test_a_file_that_is_not_there_is_named(tmp_path):
    async with AsyncClient(tls=Tls(ca=tmp_path / "none.pem")) as client:
        with pytest.raises(PenstockError, match=r"none\.pem: No such file"):
            await client.complete("hi")


@pytest.mark.parametrize("half", ["certificate", "key"])
async def test_a_certificate_and_its_key_need_each_other(certificate, half):
    """gRPC would abort the process."""
    async with AsyncClient(tls=Tls(**{half: certificate / "cert.pem"})) as client:
        with pytest.raises(PenstockError, match="go together: set both or neither"):
            await client.complete("hi")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tls-cert cert.pem", "--tls-cert: needs --tls-key as well: set both or neither"),
        ("--tls-key key.pem", "--tls-key: needs --tls-cert as well: set both or neither"),
        ("--tls-ca none.pem", "--tls-ca: cannot read none.pem: No such file or directory"),
        ("--tls-ca key.pem", "--tls-ca: key.pem contains no PEM certificate; check the file"),
        ("--tls-cert key.pem --tls-key cert.pem", "--tls-cert, --tls-key: key.pem and cert.pem cannot be used; they"),
        ("--tls-cert cert.pem --tls-key secret.pem", "cannot be used; they must be a certificate and its own private"),
    ],
)
def test_a_tls_file_that_cannot_be_used_is_named_by_its_flag(certificate, monkeypatch, capfd, flags, problem):
    monkeypatch.chdir(certificate)
    command = "openssl ec -aes128 -passout pass:secret -in key.pem -out secret.pem"
    subprocess.run(command.split(), check=True, capture_output=True)
    assert cli.main(["chat", "--once", "hi", "--target", "127.0.0.1:1", *flags.split()]) == 1
    assert capfd.readouterr().err.startswith(f"penstock chat: {problem}" if problem.startswith("--") else "penstock")
    assert cli.main(["explain", "x", *flags.split()]) == 1
    assert problem in capfd.readouterr().err


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_holds_is_refused(key):
    with pytest.raises(PenstockError, match="not printable ASCII") as caught:
        AsyncClient(api_key=key)
    assert key not in str(caught.value)
