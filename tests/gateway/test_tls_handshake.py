"""Connections over TLS count from when they are made, and those that say nothing give way."""

import asyncio
import contextlib
import socket
import ssl

import pytest
from test_certificate import issue

from penstock.clients.connection import Connection
from penstock.clients.event_loop import loop_factory
from penstock.clients.gateway.app import create_app
from penstock.clients.gateway.connection_places import ConnectionPlaces
from penstock.clients.gateway.http_server import HttpServer, HttpSettings
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.tls_handshake import TlsHandshake

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
            server = HttpServer(create_app(GatewaySettings(service=Connection("127.0.0.1:1"))), http)
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
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
            while server._places._num:
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
        while places._num:
            await asyncio.sleep(0.001)
        await ended(writer)
        server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(run(), 120))
