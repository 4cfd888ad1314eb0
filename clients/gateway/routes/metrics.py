"""The gateway's metrics and the service's, at the path where scrapers of OpenAI-compatible servers look for them.

Every client of the gateway may read them, so tenants' names are left out. Independent of the metrics' meaning.
"""

import asyncio
import re
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from fastapi import APIRouter, FastAPI, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from penstock.clients.gateway.traffic import GatewayMetrics
from penstock.clients.gateway.upstream.recent import Recent
from penstock.clients.gateway.upstream.service_link import ServiceLink

TIMEOUT_S = 10.0
_KEPT_S = 1.0
"""How long a page is cached: it needs no key, and each new one costs the service and the gateway some work."""
_TEXT, _OPENMETRICS = "text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0"
"""The two formats, as requested from the service. Forwarding callers' headers would need a cached page for each."""
_OF_TENANTS = re.compile(rb"^(?:# [A-Z]+ )?penstock_tenant_.*\n", re.MULTILINE)


def make_router() -> APIRouter:
    """Makes the route ``/metrics``, without a key, as in vLLM."""
    router = APIRouter(tags=["probes"])
    pages: dict[str, Recent[_Page]] = {}

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """The gateway's metrics and the service's in Prometheus' text format, or in OpenMetrics on request."""
        _, form = choose_encoder(request.headers.get("accept", ""))
        accepted = _OPENMETRICS if form.startswith("application/openmetrics-text") else _TEXT
        if accepted not in pages:
            pages[accepted] = Recent(partial(_both, request.app, accepted), _KEPT_S)
        page = await pages[accepted].get()
        return Response(page.text, headers={"content-type": page.form})

    return router


async def _both(app: FastAPI, accepted: str) -> "_Page":
    """Returns the service's metrics and the gateway's, or only the gateway's."""
    link: ServiceLink = app.state.link
    gateway_metrics: GatewayMetrics = app.state.gateway_metrics
    theirs = await _service_page(link.settings.metrics_target, accepted)
    gateway_metrics.has_service_metrics.set(theirs is not None)
    if theirs is None:
        encode, form = choose_encoder(accepted)
        return _Page(encode(gateway_metrics.registry), form)
    # Both pages must be in the format that the service chose.
    ours = choose_encoder(theirs.form)[0](gateway_metrics.registry)
    return _Page(theirs.text.removesuffix(b"# EOF\n") + ours, theirs.form)


@dataclass(frozen=True)
class _Page:
    text: bytes
    form: str
    """The content type."""


async def _service_page(target: str, accepted: str) -> _Page | None:
    """Returns the service's metrics; None if it returns none."""
    if not target:
        return None
    try:
        return await asyncio.to_thread(_fetch, target, accepted)
    except (OSError, HTTPException):
        return None


def _fetch(target: str, accepted: str) -> _Page | None:
    connection = HTTPConnection(target, timeout=TIMEOUT_S)
    try:
        # The service may refuse its own name in Host, which it checks to keep browsers out.
        connection.request("GET", "/metrics", headers={"Accept": accepted, "Host": "localhost"})
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            return None
        return _Page(_OF_TENANTS.sub(b"", answer.read()), answer.headers.get("content-type", "text/plain"))
    finally:
        connection.close()
