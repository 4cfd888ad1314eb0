"""HTTPS: a renewed certificate is served without a restart, a broken one is not; and connections that never agree on
TLS give way as others do."""

import asyncio
import contextlib
import datetime
import logging
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.certificate import certificate_files
from penstock.clients.gateway.server.connection_places import ConnectionPlaces
from penstock.clients.gateway.server.http_server import HttpServer, HttpSettings
from penstock.clients.gateway.server.tls_handshake import TlsHandshake
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.host.event_loop import loop_factory


def issue(folder, name):
    """A certificate that vouches for itself, and its key, in the two files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    end = begin + datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), begin, end)
    chain = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (folder / "chain.pem").write_bytes(chain)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "key.pem").write_bytes(secret)
    return chain, secret


def look(files):
    take = files.refresh()
    if take is not None:
        take()


@pytest.fixture
async def listening(tmp_path):
    """A TLS listener with a certificate that is watched, and how to see who it says it is."""
    issue(tmp_path, "first")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    files = certificate_files(context, tmp_path / "chain.pem", tmp_path / "key.pem")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def name():
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        shown = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.close()
        return shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value

    yield tmp_path, files, name
    server.close()
    await server.wait_closed()


async def test_a_renewed_certificate_is_served(listening):
    folder, files, name = listening
    assert await name() == "first"
    issue(folder, "second")
    assert await name() == "first"
    look(files)
    assert await name() == "first"  # another look tells whether all is written
    look(files)
    assert await name() == "second"


@pytest.mark.parametrize("broken", ["no PEM", "another's key", "encrypted", "gone"])
async def test_a_broken_certificate_is_logged_once_and_the_last_good_one_stays(listening, broken, caplog):
    folder, files, name = listening
    _, first_key = issue(folder, "first")
    look(files)
    look(files)
    issue(folder, "second")
    if broken == "no PEM":
        (folder / "chain.pem").write_text("nothing")
    elif broken == "encrypted":
        key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
        (folder / "key.pem").write_bytes(secret)
    elif broken == "gone":
        (folder / "key.pem").unlink()
    else:
        (folder / "key.pem").write_bytes(first_key)
    look(files)
    look(files)
    look(files)
    look(files)
    assert await name() == "first"
    said = f"{folder}/chain.pem and {folder}/key.pem cannot be used together; the certificate from before stays in use"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [said]
    issue(folder, "third")
    look(files)
    look(files)
    assert await name() == "third"
    assert caplog.records[-1].getMessage() == f"{folder}/chain.pem was read again"
    assert caplog.records[-1].levelno == logging.WARNING


# Handshakes ----------------------------------------------------------------------------------------------------------

LOOPS = pytest.mark.parametrize("new_loop", [None, loop_factory()])


@pytest.fixture
def folder(tmp_path):
    issue(tmp_path, "gateway")
    return tmp_path


def trusting():
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def ended(writer):
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def version_from(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    await ended(writer)
    return answer


@LOOPS
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_silent_connections_give_way_before_tls_is_agreed_on(folder, new_loop, sent):
    async def run():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            http = HttpSettings(
                shutdown_s=1, certificate=folder / "chain.pem", private_key=folder / "key.pem", max_connections=3
            )
            server = HttpServer(create_app(GatewaySettings(service=ConnectionOptions("127.0.0.1:1"))), http)
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.001)
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for _, writer in silent:
                writer.write(sent)
            for _ in range(3):
                assert (await version_from(port)).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(ConnectionError):
                assert await silent[0][0].read() == b""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")  # no TLS
            with contextlib.suppress(ConnectionError):
                await reader.read()
            for each in (writer, *(writer for _, writer in silent)):
                await ended(each)
            while server._places._num:  # noqa: ASYNC110 - they tell nobody
                await asyncio.sleep(0.001)
            server.should_exit = True
            await serving

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(run(), 120))


@LOOPS
def test_a_client_that_takes_too_long_for_tls_holds_no_place(folder, new_loop):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
    places = ConnectionPlaces(10, 1000)

    async def run():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: TlsHandshake(context, places, asyncio.Protocol, timeout_s=0.05), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        while places._num:  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.001)
        await ended(writer)
        server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(run(), 120))
