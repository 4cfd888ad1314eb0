"""Services with the HTTP gateway in front, as ``penstock serve --http-port`` starts it: one on the demo model, and one
whose model says what it is told to."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers
from wire.http_get import plain_client

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.http_server import HttpServer, HttpSettings
from penstock.clients.gateway.settings import GatewaySettings
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineStats
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.http_process import HttpProcess
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.config.addresses import Address
from penstock.service.text.tokenizer import Tokenizer

PENSTOCK = Path(sys.executable).with_name("penstock")


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """By default each of httpx's clients reads all certificate authorities, as each client of openai's does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@dataclass
class Served:
    """A running service."""

    http: str
    """The base of its HTTP addresses."""
    target: str
    """Of gRPC."""
    greeting: str
    process: "subprocess.Popen[str]"
    _log: Path

    @property
    def openai(self) -> str:
        """The base of OpenAI's API."""
        return f"{self.http}/v1"

    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text()


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """``penstock serve`` with HTTP, on free ports; killed at the end if it still runs."""
    command = [str(PENSTOCK), "serve", "--port=0", "--http-port=0", "--kv-cache-memory-bytes=64M", *flags]
    # A pipe that nobody reads would be full of log lines at some time, and hold the service up.
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield _greeted(process, Path(log.name))
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _greeted(process: "subprocess.Popen[str]", log: Path) -> Served:
    """As soon as it serves."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    else:
        process.wait()
        pytest.fail(f"it never served: {log.read_text()}")
    greeting = "".join(lines)
    target, base = re.search(r"serves \S+ on (\S+)", greeting), re.search(r"API at (\S+)/v1", greeting)
    assert target is not None
    assert base is not None, greeting
    return Served(base[1], target[1], greeting, process, log)


@pytest.fixture(scope="session")
def start_serving() -> Callable[..., AbstractContextManager[Served]]:
    """For tests that need a process of their own."""
    return serving


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """The demo model. Without a prefix cache, so that one request computes as another does; in float32, where no two
    tokens are equally likely."""
    with serving("--no-enable-prefix-caching", "--dtype=float32", "--max-model-len=8192") as served:
        yield served


SCRIPTED_NAME = "gpt-4o"
"""LlamaIndex calls models by OpenAI's names alone."""
SAY = b"SAY "
TURN_ENDS, TURN = 256, 257
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def _write_tokenizer(directory: Path, template: str = TEMPLATE) -> Path:
    """Id i is byte i; 256 ends an output, 257 begins a turn."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>", "<|turn|>"])
    library.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def say(history: Sequence[int], sampling: SamplingParams) -> int:
    """What the last ``SAY`` of a chat says, byte for byte, then the end."""
    if TURN not in history:
        return TURN_ENDS
    last_turn = len(history) - 1 - list(reversed(history)).index(TURN)
    said = len(history) - last_turn - 1 - len(b"assistant\n")
    wanted = _wanted(tuple(history[:last_turn]))
    return wanted[said] if said < len(wanted) else TURN_ENDS


@lru_cache(64)
def _wanted(prompt: tuple[int, ...]) -> bytes:
    return bytes(token for token in prompt if token < TURN_ENDS).rpartition(SAY)[2]


@pytest.fixture(scope="session")
def scripted_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of the models that say what they are told to."""
    return Tokenizer(_write_tokenizer(tmp_path_factory.mktemp("scripted")))


@contextmanager
def _scripted(tokenizer: Tokenizer, scheduler: SchedulerConfig | None = None, **settings: Any) -> Iterator[str]:
    ready, stop = threading.Event(), list[Callable[[], object]]()
    where = []
    config = scheduler or SchedulerConfig()

    async def serve() -> None:
        http = HttpProcess(Address("127.0.0.1"), [])
        engine = Engine(FakeExecutor(vocab_size=258, next_token=say, seconds_per_step=0.002), config)
        parsers: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
        given = ServerConfig(SCRIPTED_NAME, "127.0.0.1:0", scheduler=config, **parsers, **settings)
        server = Server(given, engine, lambda: tokenizer, http)
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        await server.start()
        where.append(f"http://{server.http_target}")
        ready.set()
        await done.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(120)
    try:
        yield where[0]
    finally:
        stop[0]()
        thread.join()


@pytest.fixture(scope="session")
def scripted(scripted_tokenizer: Tokenizer) -> Iterator[str]:
    """A service whose model says what a prompt tells it to after ``SAY``, a byte a token: the base of its HTTP
    addresses. Tool calls are as Hermes writes them, reasoning stands between <think> and </think>."""
    with _scripted(scripted_tokenizer) as base:
        yield base


@pytest.fixture(scope="session")
def start_scripted(scripted_tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[str]]:
    """The same for tests with settings of ``ServerConfig`` of their own."""
    return partial(_scripted, scripted_tokenizer)


def next_letter(history: Sequence[int], sampling: SamplingParams) -> int:
    """a, b, c ... by the length of the history."""
    return ord("a") + len(history) % 26


@dataclass
class Gateway:
    """A service and a gateway on the test's own loop, on real sockets, and an HTTP client."""

    app: FastAPI
    engine: Engine
    executor: FakeExecutor
    service: Server
    target: str
    """The service's address for gRPC."""
    http: httpx.AsyncClient

    @property
    def base(self) -> str:
        """Of OpenAI's API."""
        return f"{self.http.base_url}/v1"

    async def until(self, has: Callable[[EngineStats], bool]) -> None:
        """Waits until the engine's statistics say so."""
        while not has(self.engine.stats()):  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.005)

    async def post(self, path: str, /, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """A JSON body."""
        return await self.http.post(path, json=body, headers=headers)

    async def chunks(self, path: str, /, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, without its [DONE], which has to be there."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data:")]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its ids are bytes."""
    return Tokenizer(_write_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture
def tokenizer_with(tmp_path: Path) -> Callable[[str], Tokenizer]:
    """The same with another chat template."""
    return lambda template: Tokenizer(_write_tokenizer(tmp_path, template))


@asynccontextmanager
async def http_in_front_of(target: str, **settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """A gateway on a free port."""
    service = ConnectionOptions(target, settings.pop("api_key", None))
    app = create_app(GatewaySettings(service=service, **settings))
    http = HttpServer(app, HttpSettings(shutdown_s=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(http.serve([listener]))
        while not http.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.001)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with plain_client(base) as client:
            yield app, client
        http.should_exit = True
        await serving


@pytest.fixture
async def start_gateway(byte_tokenizer: Tokenizer) -> AsyncIterator[StartGateway]:
    """Starts services with gateways; they are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(
            next_token: Any = next_letter,
            tokenizer: Tokenizer | None = None,
            service: dict[str, Any] | None = None,
            scheduler: SchedulerConfig | None = None,
            seconds_per_step: float = 0.0,
            **settings: Any,
        ) -> Gateway:
            scheduler = scheduler or SchedulerConfig()
            vocab_size = (tokenizer or byte_tokenizer).vocab_size
            executor = FakeExecutor(vocab_size=vocab_size, next_token=next_token, seconds_per_step=seconds_per_step)
            engine = Engine(executor, scheduler)
            given: dict[str, Any] = {"listen": "127.0.0.1:0", "scheduler": scheduler} | (service or {})
            config = ServerConfig("bytes", **given)
            server = Server(config, engine, lambda: tokenizer or byte_tokenizer)
            target = await server.start()
            stack.push_async_callback(server.stop)
            app, client = await stack.enter_async_context(http_in_front_of(target, **settings))
            return Gateway(app, engine, executor, server, target, client)

        yield start


@pytest.fixture
def free_port() -> int:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def http_before() -> Callable[..., AbstractAsyncContextManager[tuple[FastAPI, httpx.AsyncClient]]]:
    """For tests that have a service of their own, or none."""
    return http_in_front_of


@pytest.fixture(name="say")
def say_fixture() -> Callable[[Sequence[int], SamplingParams], int]:
    """What a fake model answers that says what it is told to."""
    return say


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    """As it starts by itself."""
    return await start_gateway()
