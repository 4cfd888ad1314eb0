"""The chat page: one HTML file, served unchanged, under a policy that allows only its own script."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

FILE_HEADERS = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
_INLINE = {kind: re.compile(rf"<{kind}>(.*?)</{kind}>", re.DOTALL) for kind in ("script", "style")}


def make_router() -> APIRouter:
    """Makes the route of the page at ``/``."""
    html = files("penstock.clients.gateway").joinpath("page.html").read_text(encoding="utf-8")
    headers = page_headers(content_security_policy(html))
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return router


def page_headers(policy: str) -> dict[str, str]:
    """Returns the headers of a page with this policy."""
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",  # browsers see a new version of the gateway immediately
        "Cross-Origin-Opener-Policy": "same-origin",
        **FILE_HEADERS,
    }


def content_security_policy(html: str) -> str:
    """Returns the page's policy: only its own scripts and styles, and requests only to its server. Text never becomes
    markup: `trusted-types` makes browsers that support it refuse innerHTML and similar properties."""
    own = {kind: " ".join(map(source_hash, pattern.findall(html))) for kind, pattern in _INLINE.items()}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {own['script']}",
            f"style-src {own['style']}",
            "connect-src 'self'",
            "img-src data:",  # the empty icon, so that browsers request none
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def source_hash(inline: str) -> str:
    """Returns an inline element's source expression (Content Security Policy level 3, section 6.7.3)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
