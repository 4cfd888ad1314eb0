"""Assembles the ASGI app."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from penstock.clients.gateway.errors import install_handlers
from penstock.clients.gateway.routes import (
    adapters,
    api_docs,
    chat,
    chat_page,
    classification,
    completions,
    embeddings,
    messages,
    metrics,
    models,
    probes,
    responses,
    tokenizer,
)
from penstock.clients.gateway.schemas.chat import ChatChunk
from penstock.clients.gateway.schemas.unknown_fields import IgnoredFields
from penstock.clients.gateway.server.exposure import exposure_warning
from penstock.clients.gateway.server.key_file import CHECK_S
from penstock.clients.gateway.server.middleware import OuterMiddleware
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.stored.background import BackgroundRuns
from penstock.clients.gateway.stored.stored_responses import StoredResponses
from penstock.clients.gateway.traffic import GatewayMetrics
from penstock.clients.gateway.upstream.body_budget import BodyBudget
from penstock.clients.gateway.upstream.service_link import ServiceLink
from penstock.clients.host.distribution import installed_version
from penstock.clients.host.parse_turns import ParseTurns
from penstock.clients.host.reloaded_files import FileWatch

_PARTS = (
    completions,
    chat,
    responses,
    messages,
    embeddings,
    classification,
    tokenizer,
    models,
    probes,
    metrics,
    chat_page,
    api_docs,
)
_EXPOSED_HEADERS = (
    "Request-Id",
    "Retry-After",
    "Retry-After-Ms",
    "X-Penstock-Resume-Ticket",
    "X-Request-Id",
    "X-Should-Retry",
)
"""The headers of responses that web pages of other origins may read."""
_DESCRIPTION = """\
Completions, chats, embeddings and models as OpenAI's clients expect them, with vLLM's additional fields. Classes,
scores and reranking as in vLLM.

Send the service's key as `Authorization: Bearer KEY`, if it requires one. An error is `{"error": {"message", "type",
"param", "code"}}`; with 429 and 503 the header `Retry-After` has the time to wait. Every response has an
`x-request-id`, which is the service's own if the request reached it. `traceparent` names the trace of the request,
`x-session-id` its conversation. `x-slo-ttft-ms` and `x-slo-tpot-ms` are targets for the first token and between tokens.
The header `x-penstock-resume-ticket` of a stream is for the field `resume_from`, which continues it if it breaks off.
"""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def _key_watch(link: ServiceLink) -> AsyncIterator[None]:
    """Uses a new key for further requests when its file changes. Running requests end under the old one."""
    settings, file = link.settings, link.settings.api_key_file
    if file is None:
        yield
        return

    def use(key: str) -> None:
        link.settings = replace(settings, service=replace(settings.service, api_key=key))
        _log.warning("%s was read again", file.files[0].path)

    file.on_change = use
    watch = FileWatch([file], CHECK_S)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class GatewayApp(FastAPI):
    """Adds to the description what FastAPI does not know, such as the chunks of streams: no route returns one."""

    def openapi(self) -> dict[str, Any]:
        """Returns the description, created on first use."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        described = super().openapi()
        chunk = ChatChunk.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
        parts = chunk.pop("$defs")
        described["components"]["schemas"] = parts | described["components"]["schemas"] | {"ChatChunk": chunk}
        api_docs.complete(described)
        return described


def _show_stored(metrics: GatewayMetrics, stored: StoredResponses, runs: BackgroundRuns) -> None:
    metrics.show(
        "penstock_gateway_stored_responses", "Stored responses, including those in the background.", stored.count
    )
    metrics.show("penstock_gateway_stored_bytes", "Bytes of stored responses, as the limits count them.", stored.size)
    metrics.show(
        "penstock_gateway_background_responses", "Responses that are being generated in the background.", runs.count
    )


def create_app(settings: GatewaySettings) -> FastAPI:
    """Creates the app. Its link to the service (``app.state.link``) opens with the app's lifespan; the HTTP server
    reports connections to ``app.state.gateway_metrics``. Routes for identified callers are on routers with
    ``route_class=CallerRoute``, and get the caller by ``CallerDep`` (see ``routes/caller_route.py``). Raises
    PenstockError if the file of stored responses cannot be used."""
    turns = ParseTurns()
    stored = StoredResponses(settings, turns)
    runs = BackgroundRuns(stored, settings.max_background, lambda: getattr(app.state, "stop_at", 0.0))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with ServiceLink(settings) as link, _key_watch(link), exposure_warning(link), stored, runs:
            app.state.link = link
            link.on_move = app.state.gateway_metrics.moves.inc
            yield

    app = GatewayApp(
        title="penstock",
        summary="OpenAI's HTTP API in front of a penstock service.",
        description=_DESCRIPTION,
        version=installed_version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a public network
        redoc_url=None,
        redirect_slashes=False,  # it would send callers to http, and to the Host that they named
        telemetry={"tracing": False, "metrics": False, "logs": False},  # gateway/tracing.py has ours
    )
    routes = list(app.routes)
    for part in (*_PARTS, adapters) if settings.admin_target else _PARTS:
        router = part.make_router()
        app.include_router(router)
        routes += router.routes
    install_handlers(app, routes)
    app.state.gateway_metrics = GatewayMetrics()
    _show_stored(app.state.gateway_metrics, stored, runs)
    app.state.parse_turns = turns
    app.state.stored_responses = stored
    app.state.background_runs = runs
    app.state.hosted_tools = responses.HostedTools()
    app.state.body_budget = BodyBudget(settings.max_bodies_bytes)
    app.state.ignored_fields = IgnoredFields(app.state.gateway_metrics.registry)
    app.add_middleware(
        OuterMiddleware,
        max_body_bytes=settings.max_body_bytes,
        allowed_hosts=settings.allowed_hosts,
        gateway_metrics=app.state.gateway_metrics,
    )
    if settings.allowed_origins:  # outermost, so that errors have the headers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("DELETE", "GET", "HEAD", "OPTIONS", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_EXPOSED_HEADERS,
        )
    return app
