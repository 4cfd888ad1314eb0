"""The headers of every response, the names of the session's cookie, and the check that a change comes from the page
itself. Knows nothing of the service."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.clients.gateway.errors import GatewayError

CSRF_HEADER = "x-csrf-token"
_COOKIE = "penstock-status"
_DEFAULT_PORTS = {"http": 80, "https": 443}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The Content-Security-Policy: only the page's own files, no inline script or style, no other server. The icon is empty
data, so that browsers request none. The script sends the form. Browsers that support it refuse innerHTML."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class BrowserHeaders:
    """ASGI middleware that adds the headers to every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def check_same_origin(headers: Headers) -> str:
    """Returns the page's origin. Raises GatewayError if the request does not come from a page of this server. Browsers
    send ``Origin`` with every POST, and no page can change it."""
    origin = headers.get("origin", "")
    site = headers.get("sec-fetch-site", "same-origin")  # older browsers, and plain HTTP, have no such header
    if site != "same-origin" or not _is_at(origin, headers.get("host", "")):
        raise GatewayError(
            403,
            "the request does not come from this page; a proxy in front of it must pass Host and Origin on unchanged",
            code="cross_origin",
        )
    return origin


def cookie_names(host: str) -> tuple[str, str]:
    """Returns the cookie's names over HTTPS and HTTP. They contain the port, since the ports of a host share their
    cookies, and each may have a page. A name that begins with __Host- cannot be set over HTTP or for other hosts."""
    port = host.rpartition(":")[2]
    name = f"{_COOKIE}-{port}" if port.isascii() and port.isdigit() else _COOKIE
    return f"__Host-{name}", name


def _is_at(origin: str, host: str) -> bool:
    """Whether the origin is that of a page at this value of ``Host``."""
    scheme, separator, at = origin.partition("://")
    if not (separator and scheme in _DEFAULT_PORTS and at and host):
        return False
    ours = _host_and_port(host, scheme)
    return ours is not None and ours == _host_and_port(at, scheme)


def _host_and_port(host: str, scheme: str) -> tuple[str | None, int] | None:
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname, parts.port or _DEFAULT_PORTS[scheme]
    except ValueError:  # it is not a host
        return None
