"""``/docs``: the API's description as one page of HTML, for people. Needs no scripts, and so no other server."""

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #8886;padding:.25rem .5rem;vertical-align:top}"
    "h2{margin-top:2.5rem}code{font-size:.9em}"
)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_Shape = Mapping[str, Any]
"""A JSON schema, or another object of the description."""


def make_router() -> APIRouter:
    """Makes the route of the page."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        return HTMLResponse(as_html(request.app.openapi()), headers=_HEADERS)

    return router


def as_html(described: _Shape) -> str:
    """Formats an OpenAPI description."""
    info = described["info"]
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}: the API</title>',
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        _text(info["description"]),
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts += _operation(f"{method.upper()} {path}", operation)
    parts.append("<h1>Bodies</h1>")
    for name, shape in described["components"]["schemas"].items():
        parts += [f'<h2 id="{escape(name)}">{escape(name)}</h2>', _text(shape.get("description", ""))]
        required = shape.get("required", ())
        parts += _table(
            (field, _type(of) + (", required" if field in required else ""), of.get("description", ""))
            for field, of in shape.get("properties", {}).items()
        )
    return "\n".join(parts)


def _operation(name: str, operation: _Shape) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2>"
    yield _text(operation.get("description") or operation.get("summary", ""))
    yield from _table(
        (each["name"], _type(each["schema"]), each.get("description", "")) for each in operation.get("parameters", ())
    )
    if body := operation.get("requestBody"):
        yield f"<p>Body: {_content(body)}</p>"
    yield from _table(
        (status, _content(response), response.get("description", ""))
        for status, response in operation["responses"].items()
    )


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Formats rows of a name, its type as HTML, and its description."""
    if lines := [f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{_text(text)}" for name, kind, text in rows]:
        yield from ("<table>", *lines, "</table>")


def _content(of: _Shape) -> str:
    return " or ".join(_type(each.get("schema", {})) for each in of.get("content", {}).values())


def _type(shape: _Shape) -> str:
    """Describes the type of a value in a few words."""
    if ref := shape.get("$ref"):
        name = escape(ref.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if members := shape.get("anyOf") or shape.get("oneOf"):
        return " or ".join(map(_type, members))
    if values := shape.get("enum") or ([shape["const"]] if "const" in shape else None):
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if shape.get("type") == "array":
        return f"list of {_type(shape.get('items', {}))}"
    return escape(shape.get("type", "anything"))


def _text(written: str) -> str:
    """Formats a description as HTML. Of Markdown, only paragraphs and code are supported."""
    paragraphs = (re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(each)) for each in written.split("\n\n"))
    return "".join(f"<p>{each}</p>" for each in paragraphs)
