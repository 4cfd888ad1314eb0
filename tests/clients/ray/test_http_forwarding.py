"""Responses that break off between a replica and its child end with an error in the format of their API."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from penstock.clients.ray.http_forwarding import ForwardedResponse, open_session

BEGIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhalf\n\r\n"


async def forwarded(path: str, answer: bytes) -> bytes:
    """The body of the response to a request below a prefix, whose child sends ``answer`` and ends."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": f"/llm{path}", "root_path": "/llm", "query_string": b""}
    scope["headers"] = []
    async with await asyncio.start_server(end, "127.0.0.1", 0) as server, open_session() as session:
        port = server.sockets[0].getsockname()[1]
        await ForwardedResponse(session, f"http://127.0.0.1:{port}", Request(scope))(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [("/v1/messages", b"event: error\n", "overloaded_error"), ("/v1/completions", b"", "service_unavailable_error")],
)
async def test_a_failure_has_the_format_of_its_path(path: str, name: bytes, kind: str) -> None:
    body = await forwarded(path, BEGIN)
    event = body.removeprefix(b"half\n\n\n" + name + b"data: ")
    assert event != body
    assert json.loads(event)["error"]["type"] == kind
    assert json.loads(await forwarded(path, b""))["error"]["type"] == kind
