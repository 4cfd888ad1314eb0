"""Routes that speak for a caller: the key is checked and the body bounded before anything is parsed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.clients.gateway.errors import ErrorBody, GatewayError
from penstock.clients.gateway.json_body import parse_json
from penstock.clients.gateway.schemas_common import Body
from penstock.clients.gateway.service_link import Caller, ServiceLink
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.traffic import GONE
from penstock.clients.gateway.unknown_fields import without_unknown_fields
from penstock.clients.gateway.unsupported import shown

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is wrong: `param` names the field.",
        401: "No valid key.",
        404: "There is no such model.",
        413: "The body is too large.",
        429: "Too much is asked at the moment; see Retry-After.",
        503: "The service takes no requests at the moment; see Retry-After.",
    }.items()
}
"""For ``responses=`` of a route: what may go wrong."""


class CallerRoute(APIRoute):
    """A route for callers that the service knows: a bad key is answered before a bad body."""

    def get_route_handler(self) -> Handler:
        """FastAPI's own handler, after the checks."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            link: ServiceLink = request.app.state.link
            request.state.caller = await link.caller(request.headers)
            if request.method == "POST":
                await _receive_body(request, link.settings)
                parsed = await parse_json(await request.body())
                request = _ParsedRequest(request, self._known_part(parsed, request))
                await asyncio.sleep(0)  # to validate a large body takes time as well
            return await handle(request)

        return checked

    def _known_part(self, parsed: Any, request: Request) -> Any:
        """The body as it is to be validated."""
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
    """A request whose body FastAPI need not parse."""

    def __init__(self, request: Request, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = request
        self._parsed = parsed

    async def body(self) -> bytes:
        """Returns it as it came."""
        return await self._raw.body()

    async def json(self) -> Any:
        """Returns it parsed."""
        return self._parsed


async def _of_request(request: Request) -> Caller:  # FastAPI would run a plain function on a thread
    caller: Caller = request.state.caller
    return caller


CallerDep = Annotated[Caller, Depends(_of_request)]
"""The parameter of a route that is the request's caller."""


async def _receive_body(request: Request, settings: GatewaySettings) -> None:
    """Has the body in ``request``, from where FastAPI takes it. Its size is ``Guard``'s business."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise GatewayError(415, "send the body as JSON, with the header Content-Type: application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise GatewayError(415, f"Content-Encoding: {shown(coding)} is not supported; send the body uncompressed")
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            await request.body()
    except TimeoutError:
        raise GatewayError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise GatewayError(GONE, "the caller went away") from None
