"""The outermost layer: adds an id and the load to responses, limits bodies and connections, and handles every internal
error."""

import logging
import secrets
import traceback
from contextlib import ExitStack
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import GatewayError, ResponseCut, as_gateway_error, try_again
from penstock.clients.gateway.paths import as_routed, is_anthropics
from penstock.clients.gateway.schemas.unsupported import shown
from penstock.clients.gateway.tracing import GatewayTracer
from penstock.clients.gateway.traffic import CALLER, HELD_UNTIL_END, GatewayMetrics, RequestRecord
from penstock.clients.gateway.upstream.load_reports import FORMAT_HEADER
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.clients.host.error_frames import release_frames
from penstock.clients.host.log_rate import LOG_KIND

_METRICS = "/metrics"
_PROBES = frozenset({"/health", "/ping", "/version", _METRICS})
"""Paths served at any load: if a load balancer's probe is refused, it removes the gateway when it is needed most."""
_SAY_NOTHING = _PROBES - {_METRICS}
"""Paths that load balancers request with any Host."""

_log = logging.getLogger(__name__)


class KeyedService(Protocol):
    """The link to the service, which the app has as ``app.state.link``."""

    async def needs_key(self) -> bool:
        """Returns whether callers need a key. Raises RequestFailed if that is unknown."""


class OuterMiddleware:
    """ASGI middleware. An exception's text may contain a caller's data, so neither logs nor callers get it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        allowed_hosts: AllowedHosts | None,
        gateway_metrics: GatewayMetrics,
        open_paths: frozenset[str] = _SAY_NOTHING,
    ) -> None:
        """``allowed_hosts``: the accepted values of ``Host`` if callers need no key, except for ``open_paths``; None:
        any."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._allowed_hosts = allowed_hosts
        self._gateway_metrics = gateway_metrics
        self._tracer = GatewayTracer()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        routed = as_routed(scope)
        with self._gateway_metrics.request(routed) as record, ExitStack() as held:
            if routed["path"] not in _PROBES:
                held.enter_context(self._tracer.request(routed, scope["method"], record))
            routed[HELD_UNTIL_END] = held
            await self._pass_on(routed, receive, _without_bodies(send) if scope["method"] == "HEAD" else send, record)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        has_begun = False
        is_refused = self._gateway_metrics.is_full and scope["path"] not in _PROBES
        num_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                await _add_load(headers, scope)
                record.request_id = headers.setdefault("x-request-id", f"gw-{secrets.token_hex(12)}")
                if is_anthropics(scope["path"]):
                    headers["request-id"] = record.request_id  # the name that Anthropic's clients know
            await send(message)

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        try:
            if is_refused:
                raise try_again(503, "the server has reached its limit of connections; try again", code="gateway_full")
            headers = Headers(scope=scope)
            _check_host(headers, scope["http_version"])
            await self._check_host_is_ours(headers.get("host"), scope)
            if int(headers.get("content-length") or 0) > self._max_body_bytes:
                raise self._too_large()
            await self._app(scope, receive_bounded, send_with_id)
        except Exception as error:
            if not isinstance(error, GatewayError | RequestFailed | ResponseCut):
                _log_without_text(error)
            release_frames(error)
            if has_begun:  # the server closes the connection, so the caller notices that the response is incomplete
                raise _Cut from None
            response = as_gateway_error(error).response(scope["path"])
            if is_refused:
                response.headers["connection"] = "close"  # makes room for others
            await response(scope, receive, send_with_id)

    async def _check_host_is_ours(self, host: str | None, scope: Scope) -> None:
        """If callers need no key, only the check of Host keeps other web pages out. Metrics never need a key."""
        hosts = self._allowed_hosts
        if hosts is None or host is None or hosts.allows(host) or scope["path"] in self._open_paths:
            return
        link: KeyedService = scope["app"].state.link
        if scope["path"] == _METRICS or not await link.needs_key():
            problem = "is not a name of this server; use its address, or start it with --allowed-hosts"
            raise GatewayError(421, f"Host: {shown(host)} {problem}", code="invalid_host")

    def _too_large(self) -> GatewayError:
        message = f"the body may have at most {self._max_body_bytes:,} bytes; send less at once"
        return GatewayError(413, message, code="request_too_large")


async def _add_load(headers: MutableHeaders, scope: Scope) -> None:
    """Adds the service's load to a response, if its request has the header for it."""
    wanted = Headers(scope=scope).get(FORMAT_HEADER, "")
    if wanted and (caller := scope.get("state", {}).get(CALLER)) is not None:
        named = await caller.load_header(wanted)
        if named is not None:
            headers[named[0]] = named[1]


def _check_host(headers: Headers, http_version: str) -> None:
    """RFC 9112, 3.2: a request of HTTP/1.1 has exactly one host, and no request has two."""
    num_hosts = len(headers.getlist("host"))
    if num_hosts > 1 or (num_hosts == 0 and http_version != "1.0"):
        raise GatewayError(400, f"send the header Host once; there are {num_hosts}", code="invalid_host")


def _without_bodies(send: Send) -> Send:
    """Removes bodies, for HEAD."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


class _Cut(Exception):
    """Ends a response that has begun; the cause was logged."""


def _log_without_text(error: Exception) -> None:
    name = type(error).__name__
    frames = [
        f"{frame.name} {frame.filename.rpartition('/')[2]}:{frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)[-12:])
    ]
    kind = f"{name} {frames[0] if frames else ''}"
    _log.error("%s in the gateway: %s", name, " < ".join(frames), extra={LOG_KIND: kind})
