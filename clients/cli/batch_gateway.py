"""Runs lines in the format of OpenAI's Batch API with the gateway's app, in this process, without a socket."""

import asyncio
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import grpc

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.errors import PenstockError, RequestFailed

_CODES = {429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The gateway's response."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpRefused(RequestFailed):
    """The gateway refused the request, which may be retried later."""

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(_CODES[answer.status], f"HTTP status {answer.status}")
        self.answer = answer
        hint = answer.headers.get("retry-after", "")
        self.retry_after = float(hint) if hint.isdecimal() else None


class BatchGateway:
    """The gateway for one service. Starts with the first request."""

    def __init__(self, service: ConnectionOptions) -> None:
        self._service = service
        self._app: Any = None
        self._starting = asyncio.Lock()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Posts JSON. Raises HttpRefused for a status of 429 or 503, and PenstockError if the gateway is not
        installed."""
        async with self._starting:
            if self._app is None:
                self._app = await self._start()
        answer = await _call(self._app, path, body)
        if answer.status in _CODES:
            raise HttpRefused(answer)
        return answer

    async def _start(self) -> Any:
        try:  # imported by name on first use: the bare client has neither FastAPI nor pydantic
            create_app = import_module("penstock.clients.gateway.server.app").create_app
            of_gateway = import_module("penstock.clients.gateway.settings").GatewaySettings
        except ModuleNotFoundError as error:
            raise PenstockError(
                f"lines in OpenAI's format need {error.name}, which is not installed: install penstock "
                "with its extra 'gateway'"
            ) from None
        app = create_app(of_gateway(service=self._service, responses_ttl_s=0))  # they could not be fetched later
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        return app


async def _call(app: Any, path: str, body: bytes) -> HttpAnswer:
    """Sends one request to an ASGI app."""
    headers = {"host": "penstock", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": ("penstock", 80),
    }
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await app(scope, received.get, send)  # a second message never comes: the caller does not disconnect
    begun, *parts = sent
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in begun["headers"]}
    return HttpAnswer(begun["status"], found, b"".join(part.get("body", b"") for part in parts))
