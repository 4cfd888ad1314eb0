"""A service whose steps compute nothing, with the status page in front of its administration."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import httpx
import pytest
from starlette.applications import Starlette
from wire.http_get import plain_client

import penstock.v1 as pb
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.server.http_server import HttpServer, HttpSettings
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.clients.status_page.app import create_app
from penstock.clients.status_page.settings import StatusPageSettings
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.auth.identity import ApiKeys, BearerAuthenticator, Principal
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

OPERATOR, TENANT = "o" * 40, "t" * 40
"""An operator's key, and one without the right to administer."""
PRINCIPALS = {OPERATOR: Principal("operators", may_administer=True), TENANT: Principal("acme")}


@dataclass
class Keys:
    """The keys of a service, which a test may change."""

    kinds: ApiKeys = field(default_factory=lambda: Keys.of(OPERATOR, TENANT))

    @staticmethod
    def of(*keys: str) -> ApiKeys:
        return ApiKeys({sha256(key.encode()).digest(): PRINCIPALS[key] for key in keys})

    def keep(self, *keys: str) -> None:
        """Revokes all others."""
        self.kinds = self.of(*keys)


@dataclass
class Live:
    """A request that runs until it is cancelled."""

    request_id: str
    call: Any

    async def end(self) -> pb.Finished:
        """What it ends with."""
        async for response in self.call:
            if response.HasField("finished"):
                ended: pb.Finished = response.finished
                return ended
        raise AssertionError("it ended without an end")


@dataclass
class Page:
    """A page, its service, and a browser that sends what a browser sends."""

    app: Starlette
    server: Server
    http: httpx.AsyncClient
    keys: Keys
    target: str
    _stub: GenerationServiceStub
    _calls: list[Any]

    @property
    def origin(self) -> str:
        return str(self.http.base_url).rstrip("/")

    async def status(self, **query: Any) -> httpx.Response:
        return await self.http.get("/api/status", params=query)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Headers of the same names replace those of a browser; empty ones are left out."""
        sent = {"origin": self.origin, "sec-fetch-site": "same-origin"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return await self.http.post(path, json=body, headers={name: value for name, value in sent.items() if value})

    async def log_in(self, key: str = OPERATOR, **headers: str) -> httpx.Response:
        return await self.post("/api/login", {"key": key}, **headers)

    async def token(self) -> str:
        """The token of the session."""
        response = await self.status()
        assert response.status_code == 200, response.text
        token: str = response.json()["csrf_token"]
        return token

    async def start(self, client_request_id: str = "") -> Live:
        """A request that has a row and goes on."""
        start = pb.GenerationStart(
            text="hi", client_request_id=client_request_id, sampling=pb.SamplingParams(max_tokens=4000, ignore_eos=True)
        )
        metadata = (("authorization", f"Bearer {TENANT}"),)
        call: Any = self._stub.GenerateOne(pb.GenerateOneRequest(start=start), metadata=metadata)
        self._calls.append(call)
        async for response in call:
            if response.HasField("accepted"):
                return Live(response.accepted.request_id, call)
        raise AssertionError("it was not accepted")


StartPage = Callable[..., Awaitable[Page]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The demo model's."""
    return Tokenizer(resolve_model(DEMO))


@asynccontextmanager
async def page_for(target: str, **settings: Any) -> AsyncIterator[tuple[Starlette, httpx.AsyncClient]]:
    """A page on a free port for the administration at ``target``, which is patient where other programs use the
    cores."""
    settings = {"call_timeout_s": 120.0, "body_timeout_s": 120.0} | settings
    app = create_app(StatusPageSettings(ConnectionOptions(target), AllowedHosts("127.0.0.1"), **settings))
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
async def start_page(tokenizer: Tokenizer) -> AsyncIterator[StartPage]:
    """Starts services with pages; they are stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(has_keys: bool = False, **settings: Any) -> Page:
            keys = Keys()
            executor = FakeExecutor(
                vocab_size=tokenizer.vocab_size, next_token=lambda history, sampling: 65, seconds_per_step=0.005
            )
            engine = Engine(executor, SchedulerConfig())
            given: dict[str, Any] = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
            if has_keys:
                given["authenticator"] = BearerAuthenticator([lambda: keys.kinds])
            server = Server(ServerConfig("demo", **given), engine, lambda: tokenizer)
            target = await server.start()
            stack.push_async_callback(server.stop)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
            calls: list[Any] = []
            stack.callback(lambda: [call.cancel() for call in calls])
            assert server.admin_target is not None
            app, client = await stack.enter_async_context(page_for(server.admin_target, **settings))
            return Page(app, server, client, keys, target, GenerationServiceStub(channel), calls)

        yield start
