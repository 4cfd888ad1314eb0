"""``/docs``: Swagger UI for the API's description. Its files come from the package fastapi-offline; nothing is loaded
from another server."""

from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from penstock.clients.gateway.field_names import IDEMPOTENCY_KEY
from penstock.clients.gateway.routes.chat_page import FILE_HEADERS, page_headers, source_hash

_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
"""The package's files that are served, and their content types."""
_CHUNK_BYTES = 64 << 10
_SCRIPT = """
SwaggerUIBundle({
  dom_id: "#swagger-ui",
  url: document.querySelector("link[rel=service-desc]").href,
  deepLinking: true,
  validatorUrl: null
})
"""
"""Starts Swagger UI. By default, its ``validatorUrl`` is a public server, which would read the description."""
_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>penstock: the API</title>
<link rel="icon" href="data:,">
<link rel="service-desc" href="{root}openapi.json">
<link rel="stylesheet" href="{root}docs/swagger-ui.css?{version}">
<div id="swagger-ui"></div>
<noscript>Without JavaScript, read <a href="{root}openapi.json">openapi.json</a>.</noscript>
<script src="{root}docs/swagger-ui-bundle.js?{version}"></script>
<script>{script}</script>
</html>
"""
"""The page. All addresses are relative, so that it works below a proxy's prefix."""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' {source_hash(_SCRIPT)}",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is a kernel?"}], "max_tokens": 64},
    "/v1/completions": {"prompt": "The kernel is", "max_tokens": 64},
    "/v1/responses": {"input": "What is a kernel?", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": "What is a kernel?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is a kernel?"}], "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "What is a kernel?"}]},
    "/v1/embeddings": {"input": "What is a kernel?"},
    "/v1/classify": {"input": "What is a kernel?"},
    "/v1/score": {"text_1": "What is a kernel?", "text_2": ["A part of a system.", "A seed of a fruit."]},
    "/v1/rerank": {"query": "What is a kernel?", "documents": ["A part of a system.", "A seed of a fruit."]},
    "/tokenize": {"prompt": "What is a kernel?"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
"""A valid body for each path. Swagger UI would make one up from all fields, which the gateway refuses."""
_KEY_OF_REQUEST: dict[str, Any] = {
    "name": IDEMPOTENCY_KEY,
    "in": "header",
    "description": "The caller's key for the request and its repetitions. While a request with it is live, and for 10 "
    "minutes after it succeeded, another one is refused with 409.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}


def make_router() -> APIRouter:
    """Makes the routes of the page and its files. Raises ModuleNotFoundError if the package is not installed."""
    package = Distribution.from_name("fastapi-offline")
    filled = partial(_PAGE.format, version=package.version, script=_SCRIPT)
    page, page_below_slash = filled(root=""), filled(root="../")
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs(request: Request) -> HTMLResponse:
        has_slash = request.scope.get("raw_path", b"").endswith(b"/")
        return HTMLResponse(page_below_slash if has_slash else page, headers=page_headers(_POLICY))

    for name, media_type in _FILES.items():
        content = Path(str(package.locate_file(f"fastapi_offline/static/{name}"))).read_bytes()
        router.add_api_route(f"/docs/{name}", partial(_file, content, media_type))
    return router


async def _file(content: bytes, media_type: str) -> StreamingResponse:
    """Sends a file in chunks, so that a client that reads slowly holds only one of them in memory."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]

    return StreamingResponse(
        chunks(),
        media_type=media_type,
        headers={
            "Cache-Control": "public, max-age=31536000, immutable",  # the page's address of it has its version
            "Content-Length": str(len(content)),
            **FILE_HEADERS,
        },
    )


def complete(described: dict[str, Any]) -> None:
    """Adds the server's address to an OpenAPI description, the paths that accept keys, and a valid body for each path.
    Removes FastAPI's status 422, which the gateway never returns."""
    described["servers"] = [{"url": "."}]  # next to the description, below a proxy's prefix too
    described["components"]["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "A key or token of the service, if it requires one. The header `X-API-Key` may have it too.",
        }
    }
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
    for path, operations in described["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if "401" in operation["responses"]:
                operation["security"] = [{"key": []}, {}]  # {}: the service may require none
            if "409" in operation["responses"]:
                operation.setdefault("parameters", []).append(_KEY_OF_REQUEST)
            if path in _EXAMPLES:
                operation["requestBody"]["content"]["application/json"]["example"] = _EXAMPLES[path]
