"""Normalises paths and methods: other servers' spellings of paths, HEAD, and the response to OPTIONS."""

from collections.abc import Iterable, Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

_API = frozenset({"chat", "classify", "completions", "embeddings", "models", "rerank", "responses", "score"})
"""The first parts of paths under /v1. Clients whose base URL lacks /v1 leave it out; llama.cpp accepts that too."""
_OTHERS = frozenset({"detokenize", "health", "ping", "tokenize", "version"})
"""Paths outside /v1, which clients with one base URL for everything look for under it."""

_COHERES_RERANK = "/v2/rerank"


def is_anthropics(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path.startswith("/v1/messages")


def as_routed(scope: Scope) -> Scope:
    """Returns the request as the routes expect it. HEAD is routed as GET: the server sends no body for it."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": canonical_path(scope["path"])}


def canonical_path(path: str) -> str:
    """Returns the documented path for another server's spelling of it, or the path itself."""
    path = path.rstrip("/") or "/"
    first, _, rest = path.removeprefix("/").partition("/")
    if path == _COHERES_RERANK:
        return "/v1/rerank"
    if first in _API:
        return f"/v1{path}"
    if first == "v1" and rest in _OTHERS:
        return f"/{rest}"
    return path


def allowed_methods(routes: Iterable[BaseRoute], path: str) -> Sequence[str]:
    """Returns the methods that a path supports, for the header Allow."""
    scope = {"type": "http", "path": path, "method": "OPTIONS", "root_path": ""}
    found = {"OPTIONS"}
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found | {"HEAD"} if "GET" in found else found)


def options_response(methods: Sequence[str]) -> Response:
    """Returns the response to OPTIONS."""
    return Response(status_code=204, headers={"allow": ", ".join(methods)})
