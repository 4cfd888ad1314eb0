"""The service's metrics, where what scrapes OpenAI-compatible servers looks for them.

Whoever may call the gateway may read them, so tenants' names are left out. Knows nothing of what the numbers mean.
"""

import asyncio
import re
from http.client import HTTPConnection, HTTPException

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.service_link import ServiceLink

TIMEOUT_S = 10.0
_OF_TENANTS = re.compile(rb"^(?:# [A-Z]+ )?penstock_tenant_.*\n", re.MULTILINE)


def make_router() -> APIRouter:
    """``/metrics``, without a key, as vLLM has it."""
    router = APIRouter(tags=["probes"], responses={503: {"description": "The service cannot be asked."}})

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """The service's metrics in Prometheus' text format, or in OpenMetrics for who accepts it."""
        link: ServiceLink = request.app.state.link
        target = link.settings.metrics_target
        if not target:
            raise GatewayError(404, "the gateway has no metrics: it was started without --metrics-target")
        try:
            return await asyncio.to_thread(_fetch, target, request.headers.get("accept", ""))
        except (OSError, HTTPException):
            raise GatewayError(503, "the service's metrics cannot be read; try again") from None

    return router


def _fetch(target: str, accept: str) -> Response:
    connection = HTTPConnection(target, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        answer = connection.getresponse()
        page = _OF_TENANTS.sub(b"", answer.read())
        return Response(page, answer.status, {"content-type": answer.headers.get("content-type", "text/plain")})
    finally:
        connection.close()
