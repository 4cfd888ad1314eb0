"""`penstock doctor --target`: at which step the way to a service ends."""

import asyncio
import json
import shutil
import socket
import subprocess

import grpc
import pytest

from penstock.clients import PenstockError
from penstock.clients.cli import doctor


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for penstock.test that vouches for itself, its key, and a stranger's."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=penstock.test"
    for name in ("ours", "strange"):
        files = ["-addext", "subjectAltName=DNS:penstock.test", "-keyout", folder / f"{name}.key"]
        subprocess.run([*command.split(), *files, "-out", folder / f"{name}.pem"], check=True, capture_output=True)
    return folder


@pytest.fixture
def credentials(certificate):
    """Of a service; a mutual one asks for a certificate."""

    def credentials(mutual):
        key, chain = (certificate / "ours.key").read_bytes(), (certificate / "ours.pem").read_bytes()
        return grpc.ssl_server_credentials([(key, chain)], chain if mutual else None, require_client_auth=mutual)

    return credentials


@pytest.fixture
def look(capsys, monkeypatch):
    """What the command says of a target, as its exit status and its object."""
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)

    async def look(target, *flags):
        status = await asyncio.to_thread(doctor.main, ["--json", "--target", target, *map(str, flags)])
        return status, json.loads(capsys.readouterr().out)

    return look


async def test_one_that_answers(new_service, look, capsys):
    async with new_service().serving() as fake:
        status, told = await look(fake.target)
        assert (status, told["problem"], bool(told["model"])) == (0, "", True)
        assert await asyncio.to_thread(doctor.main, ["--target", fake.target]) == 0
        assert capsys.readouterr().out.startswith(f"{fake.target} answers: {told['model']}, penstock ")


async def test_nobody_is_there(look, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    for where in (target, f"unix:{tmp_path}/none"):
        status, told = await look(where)
        assert status == 1
        assert told["problem"].startswith(f"cannot connect to {where}: ")
        assert "check the address" in told["remedy"]


async def test_each_tls_mistake_is_distinguished(new_service, look, credentials, certificate):
    name = ("--tls-server-name", "penstock.test")
    trust = ("--tls-ca", certificate / "ours.pem", *name)
    ours, strange = (
        ("--tls-cert", certificate / f"{who}.pem", "--tls-key", certificate / f"{who}.key")
        for who in ("ours", "strange")
    )
    async with new_service().serving(credentials=credentials(False)) as fake:
        assert (await look(fake.target, *trust))[0] == 0
        for flags, problem in (
            ((), "the service requires TLS"),
            (name, "is not trusted: self-signed certificate"),
            (("--tls-ca", certificate / "strange.pem", *name), "is not trusted: "),
            (("--tls-ca", certificate / "ours.pem"), "is not trusted: IP address mismatch"),
        ):
            status, told = await look(fake.target, *flags)
            assert status == 1
            assert problem in told["problem"]
            assert "--tls" in told["remedy"]
    async with new_service().serving(credentials=credentials(True)) as fake:
        assert (await look(fake.target, *trust, *ours))[0] == 0
        for own in ((), strange):
            status, told = await look(fake.target, *trust, *own)
            assert status == 1
            assert "refuses the connection" in told["problem"], told
            assert "--tls-cert" in told["remedy"]


async def test_tls_where_there_is_none(new_service, look):
    async with new_service().serving() as fake:
        status, told = await look(fake.target, "--tls")
    assert status == 1
    assert told["problem"] == "the server at this address does not use TLS"


async def test_files_that_do_not_belong_together(new_service, credentials, certificate):
    flags = ["--tls-cert", str(certificate / "ours.pem"), "--tls-key", str(certificate / "strange.key")]
    async with new_service().serving(credentials=credentials(False)) as fake:
        with pytest.raises(
            PenstockError, match=r"--tls-cert, --tls-key: .* cannot be used; they must be a certificate"
        ):
            await asyncio.to_thread(doctor.main, ["--target", fake.target, *flags])


async def test_a_key_is_wanted(new_service, look, tmp_path):
    (tmp_path / "key").write_text("right")
    async with new_service().serving() as fake:
        fake.key = "right"
        status, told = await look(fake.target)
        assert (status, told["problem"]) == (1, "no valid API key")
        assert "--api-key-file" in told["remedy"]
        assert (await look(fake.target, "--api-key-file", tmp_path / "key"))[0] == 0
