"""nginx and HAProxy with the configurations in deploy/: calls of each kind, idle streams, and server-sent events that
are not held back."""

import asyncio
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from proxies.replicas import Replica, replicas
from waiting import until

import penstock.v1 as pb
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGS = {"nginx": DEPLOY / "nginx/nginx.conf", "haproxy": DEPLOY / "haproxy/haproxy.cfg"}
ENDLESS = pb.SamplingParams(max_tokens=4000, ignore_eos=True)
SHORT = {
    "nginx": {"client_body_timeout 3600s": "client_body_timeout 1s", "grpc_read_timeout 3600s": "grpc_read_timeout 1s"},
    "haproxy": {"timeout client 3600s": "timeout client 1s", "timeout server 3600s": "timeout server 1s"},
}
"""Shortens an hour to a second."""
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
STATUS_200 = 0x88
"""The header ``:status: 200`` in a compressed block."""

pytestmark = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model(DEMO))


def command_of(name: str, config: Path, *options: str) -> list[str]:
    """Returns the command that runs the program, from the Debian package of its name, in the foreground."""
    program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed (Debian: {name})")
    if name == "haproxy":
        return [program, *(options or ("-db",)), "-f", str(config)]
    user = "user root; " if os.geteuid() == 0 else ""
    return [program, *options, "-e", "stderr", "-c", str(config), "-g", f"{user}daemon off; pid {config.parent}/pid;"]


def write_config(name: str, folder: Path, changes: Mapping[str, str]) -> Path:
    """Writes the shipped configuration, with other addresses and with its files in ``folder``."""
    text = CONFIGS[name].read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config = folder / CONFIGS[name].name
    config.write_text(text.replace("http {", f"http {{ access_log off; {paths}"))
    return config


class Proxy:
    """A running proxy."""

    def __init__(self, folder: Path) -> None:
        self.grpc, self.http = folder / "grpc", folder / "http"
        """The sockets that it listens on."""
        self.target = f"unix:{self.grpc}"


@asynccontextmanager
async def running(
    name: str, folder: Path, replica: Replica, gateway: str = "127.0.0.1:1", changes: Mapping[str, str] | None = None
) -> AsyncIterator[Proxy]:
    """Runs a proxy in front of a service and a gateway, on Unix sockets."""
    proxy = Proxy(folder)
    addresses = {"127.0.0.1:50051": replica.target, "127.0.0.1:8000": gateway}
    if name == "nginx":
        addresses |= {"listen 50061": f"listen unix:{proxy.grpc}", "listen 8080": f"listen unix:{proxy.http}"}
    else:
        port = replica.metrics_target.rpartition(":")[2]
        addresses |= {"bind :50061": f"bind unix@{proxy.grpc}", "bind :8080": f"bind unix@{proxy.http}"}
        addresses |= {"port 50053": f"port {port}", "inter 2s": "inter 50ms"}
    config = write_config(name, folder, addresses | dict(changes or {}))
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command_of(name, config), stdout=log, stderr=log)
        try:
            await until(lambda: proxy.http.exists() or process.returncode is not None)
            assert process.returncode is None, (folder / "log").read_text()
            yield proxy
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def test_the_program_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    config = write_config(name, tmp_path, {})
    check = "-c" if name == "haproxy" else "-t"
    done = subprocess.run(command_of(name, config, check), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


async def test_calls_of_each_kind(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        replicas(tokenizer, 0) as (replica,),
        running(name, tmp_path, replica) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        generation = GenerationServiceStub(channel)
        stream: Any = generation.Generate()
        for ref in (1, 2, 3):  # each when the one before has ended
            sampling = pb.SamplingParams(max_tokens=ref, ignore_eos=True)
            await stream.write(pb.GenerateRequest(start=pb.GenerationStart(ref=ref, text="hi", sampling=sampling)))
            while not (message := await stream.read()).finished:
                pass
            assert message.finished[0].usage.output_tokens == ref
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        start = pb.GenerationStart(ref=1, text="hi", sampling=ENDLESS)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generation.Complete(pb.CompleteRequest(start=start), timeout=0.3)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: replica.engine.stats().requests == 0)
        one = generation.GenerateOne(pb.GenerateOneRequest(start=start))
        assert await one.read()
        one.cancel()
        await until(lambda: replica.engine.stats().requests == 0)
        refused = pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(top_p=2)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await generation.Complete(refused)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "grpc-status-details-bin" in dict(error.value.trailing_metadata() or ())


async def test_a_call_fails_at_once_without_a_service(name: str, tmp_path: Path) -> None:
    nobody: Any = type("Nobody", (), {"target": "127.0.0.1:1", "metrics_target": "127.0.0.1:1"})
    async with (
        running(name, tmp_path, nobody) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await GenerationServiceStub(channel).Complete(pb.CompleteRequest(), timeout=60)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        if name == "nginx":  # HAProxy sends 503, which clients take for UNAVAILABLE
            # Clients in Go ignore grpc-status with another status than 200, or if the stream goes on.
            is_end, block = await asyncio.to_thread(first_headers, proxy.grpc)
            assert is_end
            assert block[0] == STATUS_200


def first_headers(path: Path) -> tuple[bool, bytes]:
    """Makes a call by hand; returns whether the first headers of the response end it, and what is in them."""
    block = b"\x83\x86"  # POST and http
    for name, value in ((b":path", b"/a/b"), (b":authority", b"a"), (b"content-type", b"application/grpc")):
        block += bytes([0, len(name)]) + name + bytes([len(value)]) + value
    frames = [(SETTINGS, 0, 0, b""), (HEADERS, END_HEADERS, 1, block), (DATA, END_STREAM, 1, bytes(5))]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        for kind, flags, stream, content in frames:
            sock.sendall(len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content)
        with sock.makefile("rb") as file:
            while True:
                length, (kind, flags, _) = file.read(3), struct.unpack(">BBI", file.read(6))
                content = file.read(int.from_bytes(length, "big"))
                if kind == HEADERS:
                    return bool(flags & END_STREAM), content


async def test_an_idle_stream_outlives_an_hour(name: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """With the timeout shortened to a second, heartbeats keep the stream open, and it still works."""
    async with (
        replicas(tokenizer, 0, heartbeat_s=0.2) as (replica,),
        running(name, tmp_path, replica, changes=SHORT[name]) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        stream: Any = GenerationServiceStub(channel).Generate()
        num_heartbeats = 0
        while num_heartbeats < 8:
            message = await stream.read()
            assert message is not grpc.aio.EOF, await stream.code()
            num_heartbeats += message.HasField("heartbeat")
        sampling = pb.SamplingParams(max_tokens=1, ignore_eos=True)
        await stream.write(pb.GenerateRequest(start=pb.GenerationStart(ref=1, text="hi", sampling=sampling)))
        while not (await stream.read()).finished:
            pass
        stream.cancel()


async def test_events_pass_one_by_one(name: str, tmp_path: Path) -> None:
    """A fake gateway sends each event only after the one before has arrived."""
    arrived = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET /health"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for number in range(5):
                    event = b"data: %d\n\n" % number
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    await arrived.wait()
                    arrived.clear()
                writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    gateway = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    nobody: Any = type("Nobody", (), {"target": "127.0.0.1:1", "metrics_target": "127.0.0.1:1"})
    with closing(server):
        async with running(name, tmp_path, nobody, gateway) as proxy:
            transport = httpx.AsyncHTTPTransport(uds=str(proxy.http))
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
                http.stream("GET", "/v1/events") as response,
            ):
                events = []
                async for event in response.aiter_text():
                    events.append(event)
                    arrived.set()
                assert events == [f"data: {number}\n\n" for number in range(5)]
