"""Routes for identified callers: check the key and limit the body before parsing it."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.clients.errors import InvalidOption
from penstock.clients.gateway.errors import ErrorBody, GatewayError, try_again
from penstock.clients.gateway.requests.json_body import parse_json
from penstock.clients.gateway.schemas.common import Body
from penstock.clients.gateway.schemas.unknown_fields import without_unknown_fields
from penstock.clients.gateway.schemas.unsupported import shown
from penstock.clients.gateway.traffic import GONE, HELD_UNTIL_END
from penstock.clients.gateway.upstream.body_budget import BodyBudget, NoRoomForBody
from penstock.clients.gateway.upstream.eagerly import rest_of
from penstock.clients.gateway.upstream.service_link import ServiceLink, UpstreamCaller
from penstock.clients.host.parse_turns import ParseTurns

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

_TURN_BYTES = 8 << 10
"""Bodies above this size wait for their turn to be parsed."""
_REFUSED = frozenset({400, 404, 408, 413, 415})
"""Errors of a request that count against its tenant's rate."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is invalid; `param` names the field.",
        401: "The API key is missing or invalid.",
        404: "The model does not exist.",
        413: "The body is too large.",
        429: "The service is overloaded, or the tenant exceeds its limits; see Retry-After.",
        503: "The service does not accept requests at the moment; see Retry-After.",
    }.items()
}
"""The errors of a route, for its ``responses=``."""
GENERATION_ERRORS = ERRORS | {
    409: {"model": ErrorBody, "description": "Another request with the same `Idempotency-Key` is live or has ended."}
}
"""The errors of a route that generates."""


class CallerRoute(APIRoute):
    """A route for callers that the service has accepted: a bad key is reported before a bad body."""

    def get_route_handler(self) -> Handler:
        """Returns FastAPI's handler, preceded by the checks."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            link: ServiceLink = request.app.state.link
            caller = request.state.caller = await link.caller(request.headers)
            if request.method != "POST":
                return await handle(request)
            caller.check_rate()
            if self.body_field is None:
                return await handle(request)
            with _counting_refusals(caller):
                body = [await _receive_body(request, caller)]
            return await self._handle(handle, request, body)

        return checked

    async def _handle(self, handle: Handler, request: Request, only_body: list[bytearray]) -> Response:
        """Parses and validates a body and starts the request, in its caller's turn. Takes the body out of its list: it
        may be large, and no frame should keep it until the end of the answer."""
        turns: ParseTurns = request.app.state.parse_turns
        caller: UpstreamCaller = request.state.caller
        body = only_body.pop()
        async with AsyncExitStack() as stack:
            stack.enter_context(_counting_refusals(caller))
            if len(body) > _TURN_BYTES:
                await stack.enter_async_context(turns.turn(caller.counted_as))
            parsed = _ParsedRequest(request, self._known_part(await parse_json(body, turns), request))
            del body
            await turns.pause()
            handling = handle(parsed)
            try:
                with turns.portion():
                    awaited = handling.send(None)
            except StopIteration as done:
                response: Response = done.value
                return response
        return await rest_of(handling, awaited)

    def _known_part(self, parsed: Any, request: Request) -> Any:
        """Returns the body to validate."""
        link: ServiceLink = request.app.state.link
        if not link.settings.ignores_unknown_fields or self.body_field is None:
            return parsed
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, Body), "all bodies are"
        kept, ignored = without_unknown_fields(parsed, model, model.other_fields())
        request.app.state.ignored_fields.note(self.path, ignored)
        return kept


class _ParsedRequest(Request):
    """A request whose body FastAPI need not parse. The bytes are no longer needed: a stream may run for hours."""

    def __init__(self, request: Request, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        """Returns a placeholder, which FastAPI treats as a body."""
        return b"parsed"

    async def json(self) -> Any:
        """Returns the body, only once."""
        parsed, self._parsed = self._parsed, None
        return parsed


async def _of_request(request: Request) -> UpstreamCaller:  # FastAPI would run a plain function in a thread
    caller: UpstreamCaller = request.state.caller
    return caller


CallerDep = Annotated[UpstreamCaller, Depends(_of_request)]
"""The parameter of a route that is the request's caller."""


@contextmanager
def _counting_refusals(caller: UpstreamCaller) -> Iterator[None]:
    """Counts requests that the gateway refuses against the tenant's rate: they never reach the service, which counts
    the others."""
    try:
        yield
    except (GatewayError, RequestValidationError, InvalidOption) as error:
        if not isinstance(error, GatewayError) or error.status in _REFUSED:
            caller.count_refusal()
        raise


async def _receive_body(request: Request, caller: UpstreamCaller) -> bytearray:
    """Receives the whole body. The outer middleware limits its size. It is counted until the request ends, or until
    less of it is needed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise GatewayError(415, "send the body as JSON, with the header Content-Type: application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise GatewayError(415, f"Content-Encoding: {shown(coding)} is not supported; send the body uncompressed")
    held: ExitStack = request.scope[HELD_UNTIL_END]
    budget: BodyBudget = request.app.state.body_budget
    counted = caller.body = held.enter_context(budget.body(caller.counted_as))
    timeout_s, whole = caller.settings.body_timeout_s, bytearray()
    try:
        async with asyncio.timeout(timeout_s) as limit:
            counted.evict = partial(_end_soon, limit)
            async for part in request.stream():
                await counted.add_bytes(len(part))
                whole += part
    except TimeoutError:
        if counted.evict is None:
            text = "the memory for bodies ran out, and this one was the slowest to arrive; try again, or send it faster"
            raise try_again(408, text, code="body_too_slow") from None
        raise GatewayError(408, f"the body did not arrive within {timeout_s:g} s; send less, or faster") from None
    except NoRoomForBody as error:
        raise _no_room(error, budget) from None
    except ClientDisconnect:
        raise GatewayError(GONE, "the caller disconnected") from None
    finally:
        counted.evict = None
    return whole


def _end_soon(limit: asyncio.Timeout) -> None:
    if not limit.expired():  # an expired limit cannot be changed
        limit.reschedule(0.0)


def _no_room(error: NoRoomForBody, budget: BodyBudget) -> GatewayError:
    if error.is_tenants:
        message = f"the bodies of one tenant may take at most {budget.max_tenant_bytes:,} bytes; send fewer at once"
        return try_again(429, message, code="bodies_full")
    return try_again(
        503, f"all bodies together may take at most {budget.max_bytes:,} bytes; try again", code="gateway_full"
    )
