"""Passes HTTP requests on to the gateway of a replica's child, and its responses back, chunk by chunk.

Headers and bodies stay as they are, so routes, errors and streams are those of docs/http.md.
"""

from collections.abc import Iterable, Sequence
from urllib.parse import quote

import aiohttp
import grpc
from multidict import CIMultiDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from penstock.clients.errors import RequestFailed, StreamBroken, Unreachable
from penstock.clients.gateway.errors import GatewayError, from_failure

_CONNECT_S = 5.0
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that describe one connection (RFC 9110, 7.6.1)."""
_SET_BY_PROXY = frozenset({"date", "server"})
"""Headers that Serve's proxy adds to every response."""
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to a request."""


class ResponseBroken(Exception):
    """The child ended, or closed the connection, before a response was complete."""


def open_session() -> aiohttp.ClientSession:
    """Returns a session for connections to gateways from the running event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_NOT_ADDED,
    )


class ForwardedResponse(Response):
    """The response to a request, which is sent to the gateway when this is called. The response is received while it is
    sent. If its task is cancelled, because the client has disconnected, the connection to the gateway closes, and the
    gateway cancels the request."""

    def __init__(self, session: aiohttp.ClientSession, base: str, request: Request) -> None:
        """``base`` is the gateway's URL, without a path."""
        super().__init__()
        self._session = session
        self._path = _path(request.scope)
        self._url = URL(base + self._path, encoded=True)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        has_body = bool({"content-length", "transfer-encoding"} & set(request.headers))
        status = is_stream = None
        try:
            async with self._session.request(
                request.method,
                self._url,
                headers=CIMultiDict(_end_to_end(request.headers.raw)),
                data=request.stream() if has_body else None,
                allow_redirects=False,
            ) as upstream:
                status, is_stream = upstream.status, upstream.content_type == "text/event-stream"
                await send({"type": "http.response.start", "status": status, "headers": _response_headers(upstream)})
                async for chunk in upstream.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except aiohttp.ClientError as error:
            if status is None:
                await _failure(Unreachable).response(self._path)(scope, receive, send)
                return
            if not is_stream:
                raise ResponseBroken("the service ended before the response was complete") from error
            event = b"\n\n" + _failure(StreamBroken).last_event(self._path)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _failure(kind: type[RequestFailed]) -> GatewayError:
    """Returns the error that the gateway would report if its service had ended."""
    return from_failure(kind(grpc.StatusCode.UNAVAILABLE, ""))


def _response_headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in _end_to_end(response.raw_headers)
        if name.lower() not in _SET_BY_PROXY
    ]


def _path(scope: Scope) -> str:
    """Returns the path and query below the application's prefix, as the client encoded them."""
    path = (scope.get("raw_path") or quote(scope["path"]).encode()).decode("ascii")
    query = scope["query_string"].decode("ascii")
    return path.removeprefix(quote(scope.get("root_path", ""))) + (f"?{query}" if query else "")


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    """Yields the headers that are not only for one connection."""
    decoded = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    named = (value for name, value in decoded if name.lower() == "connection")
    dropped = _HOP_BY_HOP | {word.strip().lower() for value in named for word in value.split(",")}
    return ((name, value) for name, value in decoded if name.lower() not in dropped)
