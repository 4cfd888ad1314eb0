"""Routes that speak for a caller: the key is checked and the body bounded before anything is parsed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.clients.gateway.errors import ErrorBody, GatewayError
from penstock.clients.gateway.service_link import Caller, ServiceLink
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.traffic import GONE

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
            return await handle(request)

        return checked


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
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            await request.body()
    except TimeoutError:
        raise GatewayError(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise GatewayError(GONE, "the caller went away") from None
