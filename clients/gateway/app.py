"""The ASGI app, put together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from penstock.clients.gateway import chat, completions, embeddings, metrics, models, page, probes, responses, tokenizer
from penstock.clients.gateway.errors import install_handlers
from penstock.clients.gateway.guard import Guard
from penstock.clients.gateway.schemas_chat import ChatChunk
from penstock.clients.gateway.service_link import ServiceLink
from penstock.clients.gateway.settings import GatewaySettings

_PARTS = (completions, chat, responses, embeddings, tokenizer, models, probes, metrics, page)
_DESCRIPTION = """\
Completions, chats, embeddings and models as OpenAI's clients expect them, with vLLM's additional fields.

Send the service's key as `Authorization: Bearer KEY`, if it wants one. An error is `{"error": {"message", "type",
"param", "code"}}`; with 429 and 503 the header `Retry-After` says when to try again. Every answer has an
`x-request-id`, which is the service's own where the request got so far. `traceparent` is passed on.
"""


class GatewayApp(FastAPI):
    """Describes what it streams, too: no route returns a chunk, so that nothing else brings its schema in."""

    def openapi(self) -> dict[str, Any]:
        """The description, made when it is first asked for."""
        if self.openapi_schema is None:
            described = super().openapi()
            chunk = ChatChunk.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
            parts = chunk.pop("$defs")
            described["components"]["schemas"] = parts | described["components"]["schemas"] | {"ChatChunk": chunk}
        assert self.openapi_schema is not None, "made just now"
        return self.openapi_schema


def create_app(settings: GatewaySettings) -> FastAPI:
    """The app; its link to the service (``app.state.link``) opens with the app's lifespan. Routes that speak for a
    caller are on routers of ``route_class=CallerRoute``, and get theirs by ``CallerDep`` (see ``route``)."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with ServiceLink(settings) as link:
            app.state.link = link
            yield

    app = GatewayApp(
        title="penstock",
        summary="OpenAI's HTTP API in front of a penstock service.",
        description=_DESCRIPTION,
        version=version("penstock"),
        lifespan=lifespan,
    )
    for part in _PARTS:
        app.include_router(part.make_router())
    install_handlers(app)
    app.add_middleware(Guard, settings=settings)
    return app
