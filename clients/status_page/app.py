"""Assembles the ASGI app of the status page: its three files, its API, and the gateway's limits on requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.server.middleware import OuterMiddleware
from penstock.clients.gateway.traffic import GatewayMetrics
from penstock.clients.status_page.admin_link import AdminLink
from penstock.clients.status_page.browser import BrowserHeaders
from penstock.clients.status_page.routes import StatusRoutes
from penstock.clients.status_page.settings import StatusPageSettings

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""The page's files by their paths. They are the same for everyone, so they need neither a key nor a known Host."""


def create_app(settings: StatusPageSettings) -> Starlette:
    """Creates the app. Its link to the service (``app.state.link``, for the middleware) opens with the app's
    lifespan."""
    api = StatusRoutes(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AdminLink.opened(settings) as api.link:
            app.state.link = api.link
            yield

    app = Starlette(
        routes=[*(_file_route(path, *file) for path, file in _FILES.items()), *api.routes()],
        lifespan=lifespan,
        exception_handlers={HTTPException: _of_http},
    )
    app.state.gateway_metrics = GatewayMetrics()
    app.add_middleware(
        OuterMiddleware,
        max_body_bytes=settings.max_body_bytes,
        allowed_hosts=settings.allowed_hosts,
        gateway_metrics=app.state.gateway_metrics,
        open_paths=frozenset(_FILES),
    )
    app.add_middleware(BrowserHeaders)  # outermost, so that errors have the headers too
    return app


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = files("penstock.clients.status_page").joinpath(name).read_bytes()

    async def send_file(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(path, send_file, methods=["GET"])


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    problem = {404: "no such path", 405: f"this path does not support {request.method}"}.get(status, error.detail)
    response = GatewayError(status, problem).response(request.scope["path"])
    response.headers.update(error.headers or {})
    return response
