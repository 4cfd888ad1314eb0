"""The probes, which need no key."""

from importlib.metadata import version

import httpx
import pytest

from penstock.clients.connection import Connection
from penstock.clients.gateway.app import create_app
from penstock.clients.gateway.settings import GatewaySettings


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_a_service_that_takes_requests_is_healthy(scripted, method, path):
    answer = httpx.request(method, scripted + path, timeout=120)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_description_says_that_probes_answer_without_a_body(scripted):
    """Clients that are made from it would parse one."""
    paths = httpx.get(f"{scripted}/openapi.json", timeout=120).json()["paths"]
    for method, path in (("get", "/health"), ("get", "/ping"), ("post", "/ping")):
        assert "content" not in paths[path][method]["responses"]["200"]


def test_the_version_is_told(scripted):
    assert httpx.get(f"{scripted}/version", timeout=120).json() == {"version": version("penstock")}


async def test_without_a_service_the_gateway_is_not_healthy():
    app = create_app(GatewaySettings(service=Connection("127.0.0.1:1")))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/version")).status_code == 200
