"""The page's own API: the status, and what an operator may do. Each request is checked by the service, under the key of
the operator's session."""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, TypeVar

import grpc
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.clients.cli.as_dict import as_dict
from penstock.clients.errors import RequestFailed, Unreachable
from penstock.clients.gateway.errors import RETRY_S, GatewayError, from_failure
from penstock.clients.gateway.traffic import GONE
from penstock.clients.status_page.admin_link import AdminLink
from penstock.clients.status_page.browser import CSRF_HEADER, check_same_origin, cookie_names
from penstock.clients.status_page.sessions import OperatorSession, OperatorSessions
from penstock.clients.status_page.settings import StatusPageSettings

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)
_PAGE_SIZE, _MAX_PAGE_SIZE = 50, 200
_MAX_TOKEN_LENGTH = 256
_LOG_IN = "log in with a key that has the right to administer"
_DENIED = "this key does not have the right to administer: its line in the service's key file must end with admin"
_DOWN = "the service does not answer; it may be starting, restarting or stopped"


class KeyBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a login: an API key, or a token of an identity provider."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=8192, pattern="^[!-~]+$")]


class CancelBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a cancellation: the service's id of a request."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class NoBody(msgspec.Struct, forbid_unknown_fields=True):
    """An empty object."""


class StatusRoutes:
    """The handlers, with the sessions of one process."""

    link: AdminLink
    """The link to the service. The app sets it when it starts."""

    def __init__(self, settings: StatusPageSettings) -> None:
        self._settings = settings
        self._sessions = OperatorSessions()

    def routes(self) -> list[Route]:
        return [
            Route("/api/status", self.status, methods=["GET"]),
            Route("/api/login", self.login, methods=["POST"]),
            Route("/api/logout", self.logout, methods=["POST"]),
            Route("/api/cancel", self.cancel, methods=["POST"]),
        ]

    async def status(self, request: Request) -> Response:
        """Returns the statistics and one page of the live requests."""
        page_size, page_token = _page(request)
        session = await self._session(request)
        stats = await self._called(request, self.link.stats(session.key))
        page = await self._called(request, self.link.requests(session.key, page_size, page_token))
        return JSONResponse(
            {
                "csrf_token": session.csrf_token,
                "has_session": session.key is not None,
                "stats": as_dict(stats),
                "requests": [as_dict(live) for live in page.requests],
                "next_page_token": page.next_page_token,
            }
        )

    async def login(self, request: Request) -> Response:
        """Begins a session, if the service accepts the key."""
        origin = check_same_origin(request.headers)
        body = await self._body(request, KeyBody)
        await self._check_exposure()
        await self._called(request, self.link.check_key(body.key))
        session_id = self._sessions.open(body.key)
        response = JSONResponse({})
        is_secure = origin.startswith("https://")  # also behind a proxy that has the certificate
        over_tls, plain = cookie_names(request.headers["host"])
        response.set_cookie(
            over_tls if is_secure else plain, session_id, secure=is_secure, httponly=True, samesite="strict"
        )
        return response

    async def logout(self, request: Request) -> Response:
        await self._changing_session(request)
        await self._body(request, NoBody)
        self._end_session(request)
        return JSONResponse({})

    async def cancel(self, request: Request) -> Response:
        """Cancels one request. It may have ended already."""
        session = await self._changing_session(request)
        body = await self._body(request, CancelBody)
        was_live = await self._called(request, self.link.cancel(session.key, body.request_id))
        return JSONResponse({"was_live": was_live})

    async def _session(self, request: Request) -> OperatorSession:
        """Returns the operator's session. Raises GatewayError if there must be one and there is none."""
        await self._check_exposure()
        for session_id in _session_ids(request):
            if (session := self._sessions.find(session_id)) is not None:
                return session
        if await _reached(self.link.needs_key()):
            raise GatewayError(401, _LOG_IN, code="login_required")
        return self._sessions.without_key

    async def _changing_session(self, request: Request) -> OperatorSession:
        """Returns the session of a request that changes something. Raises GatewayError unless the page itself sent
        it."""
        check_same_origin(request.headers)
        session = await self._session(request)
        if not session.is_token(request.headers.get(CSRF_HEADER, "")):
            message = f"the header {CSRF_HEADER} is not the token of this session; reload the page"
            raise GatewayError(403, message, code="invalid_csrf_token")
        return session

    async def _check_exposure(self) -> None:
        """Refuses to let other machines administer a service without keys."""
        if self._settings.is_exposed and not await _reached(self.link.needs_key()):
            raise GatewayError(
                403,
                "other machines can reach this page, but the service needs no key; start the service with "
                "--api-keys-file, or the page with --host 127.0.0.1",
                code="exposed",
            )

    async def _called(self, request: Request, call: Awaitable[T]) -> T:
        """Waits for a call to the service. The session ends if the service no longer accepts its key."""
        try:
            return await _reached(call)
        except GatewayError as error:
            if error.status in (401, 403):
                self._end_session(request)
            raise

    def _end_session(self, request: Request) -> None:
        for session_id in _session_ids(request):
            self._sessions.close(session_id)

    async def _body(self, request: Request, kind: type[B]) -> B:
        """Receives and checks a JSON body. The outer middleware limits its size."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise GatewayError(415, "send the body as JSON, with the header Content-Type: application/json")
        timeout_s = self._settings.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return msgspec.json.decode(await request.body(), type=kind)
        except TimeoutError:
            raise GatewayError(408, f"the body did not arrive within {timeout_s:g} s; try again") from None
        except ClientDisconnect:
            raise GatewayError(GONE, "the caller disconnected") from None
        except (msgspec.DecodeError, UnicodeDecodeError):  # a ValidationError is a DecodeError
            names = ", ".join(field.name for field in msgspec.structs.fields(kind)) or "no field"
            raise GatewayError(400, f"the body must be a JSON object with a valid value of: {names}") from None


def _page(request: Request) -> tuple[int, str]:
    """Returns the size and the token of the requested page. Raises GatewayError."""
    size = request.query_params.get("page_size", str(_PAGE_SIZE))
    if not (size.isascii() and size.isdigit() and len(size) <= 3 and 1 <= int(size) <= _MAX_PAGE_SIZE):
        raise GatewayError(400, f"page_size: must be 1 to {_MAX_PAGE_SIZE}", param="page_size")
    token = request.query_params.get("page_token", "")
    if len(token) > _MAX_TOKEN_LENGTH:
        raise GatewayError(400, "page_token: is not one of this service", param="page_token")
    return int(size), token


def _session_ids(request: Request) -> list[str]:
    names = cookie_names(request.headers.get("host", ""))
    return [request.cookies[name] for name in names if name in request.cookies]


async def _reached(call: Awaitable[T]) -> T:
    """Waits for a call to the service. Raises GatewayError, with messages for operators in a browser."""
    try:
        return await call
    except RequestFailed as failure:
        if failure.code is grpc.StatusCode.UNAUTHENTICATED:
            raise GatewayError(401, f"the service does not accept this key; {_LOG_IN}", code="invalid_key") from None
        if failure.code is grpc.StatusCode.PERMISSION_DENIED:
            raise GatewayError(403, _DENIED, code="admin_denied") from None
        is_down = failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if is_down or isinstance(failure, Unreachable):
            raise GatewayError(503, _DOWN, code="service_unavailable", retry_after_s=RETRY_S, may_retry=True) from None
        raise from_failure(failure) from None
