"""The gateway's metrics and the service's, where what scrapes OpenAI-compatible servers looks for them.

Whoever may call the gateway may read them, so tenants' names are left out. Knows nothing of what the numbers mean.
"""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from penstock.clients.gateway.service_link import ServiceLink
from penstock.clients.gateway.traffic import Traffic

TIMEOUT_S = 10.0
_OF_TENANTS = re.compile(rb"^(?:# [A-Z]+ )?penstock_tenant_.*\n", re.MULTILINE)
_END = b"# EOF\n"
"""The last line of OpenMetrics."""


def make_router() -> APIRouter:
    """``/metrics``, without a key, as vLLM has it."""
    router = APIRouter(tags=["probes"])

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """The gateway's metrics and the service's in Prometheus' text format, or in OpenMetrics for who accepts it."""
        link: ServiceLink = request.app.state.link
        traffic: Traffic = request.app.state.traffic
        accepted = request.headers.get("accept", "")
        theirs = await _service_page(link.settings.metrics_target, accepted)
        traffic.has_service_metrics.set(theirs is not None)
        if theirs is None:
            encode, form = choose_encoder(accepted)
            return Response(encode(traffic.registry), headers={"content-type": form})
        # Two pages are one where both are in the form that the service chose.
        ours = choose_encoder(theirs.form)[0](traffic.registry)
        return Response(theirs.text.removesuffix(_END) + ours, headers={"content-type": theirs.form})

    return router


@dataclass(frozen=True)
class _Page:
    text: bytes
    form: str
    """Its content type."""


async def _service_page(target: str, accepted: str) -> _Page | None:
    """The service's metrics; None where it tells none."""
    if not target:
        return None
    try:
        return await asyncio.to_thread(_fetch, target, accepted)
    except (OSError, HTTPException):
        return None


def _fetch(target: str, accepted: str) -> _Page | None:
    connection = HTTPConnection(target, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accepted})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            return None
        return _Page(_OF_TENANTS.sub(b"", answer.read()), answer.headers.get("content-type", "text/plain"))
    finally:
        connection.close()
