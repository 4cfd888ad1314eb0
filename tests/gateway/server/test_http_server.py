"""How the gateway listens: what too many connections and who reads nothing cost it, over TCP, TLS and Unix sockets."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.http_server import HttpServer, HttpSettings
from penstock.clients.gateway.settings import GatewaySettings

COMPLETIONS = "/v1/completions"
NOWHERE = "127.0.0.1:1"


@contextlib.asynccontextmanager
async def listening(listener, target=NOWHERE, **http):
    """A gateway on ``listener``."""
    server = HttpServer(
        create_app(GatewaySettings(service=ConnectionOptions(target))), HttpSettings(shutdown_s=1, **http)
    )
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.001)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def unix(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        yield listener


async def test_connections_send_at_once(tcp):
    """They inherit it from the listener. asyncio's own loop would set it only for some listeners."""
    async with listening(tcp):
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def target_of(gateway):
    """The service that is behind it."""
    return gateway.app.state.link.settings.service.target


def post(**fields):
    """A request for much, on a connection of its own."""
    body = json.dumps({"prompt": "a", "ignore_eos": True, "logprobs": 20} | fields)
    head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def test_above_the_limit_of_connections_probes_are_answered_and_nothing_else_is(start_gateway, tcp):
    behind = await start_gateway(service={"metrics_listen": "127.0.0.1:0"}, seconds_per_step=0.01)
    host, port = tcp.getsockname()
    base = f"http://{host}:{port}"
    async with (
        listening(tcp, target_of(behind), max_connections=1),
        httpx.AsyncClient(base_url=base, trust_env=False) as http,
    ):
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", COMPLETIONS, json=body) as busy:
            assert busy.status_code == 200
            for probe in ("/health", "/ping", "/version", "/metrics"):
                assert (await http.get(probe)).status_code == 200
            refused = await http.get("/v1/models")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "gateway_full"
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["x-request-id"]
            assert refused.headers["connection"] == "close"
            assert (await http.get("/health")).status_code == 200
        async with asyncio.timeout(120):
            while (await http.get("/v1/models")).status_code != 200:
                pass


@pytest.mark.parametrize("sent", [b"", b"GET /ver", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_connections_without_a_request_give_way_to_new_ones(start_gateway, tcp, sent):
    behind = await start_gateway()
    host, port = tcp.getsockname()
    async with (
        listening(tcp, target_of(behind), max_connections=2),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as http,
        asyncio.timeout(120),
    ):
        idle = [await asyncio.open_connection(host, port) for _ in range(2)]
        for reader, writer in idle:
            writer.write(sent)
            if sent.endswith(b"\r\n\r\n"):
                assert await reader.read(1)
        assert (await http.get("/v1/models")).status_code == 200
        with contextlib.suppress(ConnectionError):
            await idle[0][0].read()  # it has ended, and the other one has not
        assert not idle[1][0].at_eof()
        for _, writer in idle:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_who_takes_nothing_of_an_answer_loses_it_and_the_request_is_cancelled(start_gateway, request, kind):
    behind = await start_gateway(seconds_per_step=0.005)
    listener = request.getfixturevalue(kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = post(max_tokens=4000, stream=True)
    with socket.socket(listener.family) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with listening(listener, target_of(behind), write_timeout_s=1):
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(caller, listener.getsockname())
            await loop.sock_sendall(caller, sent)
            await behind.until(lambda stats: stats.output_tokens > 0)
            await behind.until(lambda stats: stats.requests == 0)
            assert behind.engine.stats().output_tokens < 4000
            with contextlib.suppress(ConnectionError):
                while await loop.sock_recv(caller, 1 << 16):  # what had been sent, and then the end
                    pass


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_who_reads_slowly_gets_all(start_gateway, request, kind):
    behind = await start_gateway()
    listener = request.getfixturevalue(kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = post(max_tokens=2000)
    with socket.socket(listener.family) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        async with listening(listener, target_of(behind), write_timeout_s=4):
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(caller, listener.getsockname())
            await loop.sock_sendall(caller, sent)
            answer = b""
            for _ in range(12):
                await asyncio.sleep(0.4)
                answer += await loop.sock_recv(caller, 1 << 16)
            while part := await loop.sock_recv(caller, 1 << 16):
                answer += part
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2000
