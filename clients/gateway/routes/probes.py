"""Probes without a key: whether the service accepts requests, and the version."""

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.clients.gateway.upstream.service_link import ServiceLink
from penstock.clients.host.distribution import installed_version


class Version(BaseModel):
    """The version of penstock."""

    version: str


def make_router() -> APIRouter:
    """Makes ``/health``, ``/ping``, which is the same under SageMaker's name, and ``/version``."""
    this_version = Version(version=installed_version())
    router = APIRouter(tags=["probes"], responses={503: {"description": "The service does not accept requests."}})

    @router.get("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response)
    async def health(request: Request) -> Response:
        """Returns 200 if the service behind the gateway accepts requests."""
        link: ServiceLink = request.app.state.link
        return Response(status_code=200 if await link.is_serving() else 503)

    @router.get("/version")
    async def tell_version() -> Version:
        """The version of penstock."""
        return this_version

    return router
