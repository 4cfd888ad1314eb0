"""The probes, which need no key."""

import asyncio

import grpc
import httpx
import pytest

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.upstream import service_state
from penstock.clients.gateway.upstream.service_link import ServiceLink
from penstock.clients.host.distribution import installed_version


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_a_service_that_takes_requests_is_healthy(scripted, method, path):
    answer = httpx.request(method, scripted + path, timeout=120)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_openapi_description_gives_probe_answers_no_body(scripted):
    """Clients that are made from it would parse one."""
    paths = httpx.get(f"{scripted}/openapi.json", timeout=120).json()["paths"]
    for method, path in (("get", "/health"), ("get", "/ping"), ("post", "/ping")):
        assert "content" not in paths[path][method]["responses"]["200"]


def test_the_version_is_reported(scripted):
    assert httpx.get(f"{scripted}/version", timeout=120).json() == {"version": installed_version()}


async def test_many_probes_at_once_are_one_question(monkeypatch):
    asked = 0

    async def count(*_, **__):
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return True

    monkeypatch.setattr(service_state, "any_is_serving", count)
    app = create_app(GatewaySettings(service=ConnectionOptions("127.0.0.1:1")))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        answers = await asyncio.gather(*(http.get("/health") for _ in range(100)))
    assert {each.status_code for each in answers} == {200}
    assert asked == 1


@pytest.mark.parametrize("was_serving", [True, False])
async def test_an_overloaded_health_check_keeps_the_last_state(monkeypatch, was_serving):
    answers: list[bool | grpc.StatusCode] = [
        was_serving, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
    ]  # fmt: skip

    async def answer(*_, **__):
        given = answers.pop(0)
        if isinstance(given, grpc.StatusCode):
            raise grpc.aio.AioRpcError(given, grpc.aio.Metadata(), grpc.aio.Metadata())
        return given

    monkeypatch.setattr(service_state, "any_is_serving", answer)
    monkeypatch.setattr(service_state, "_HEALTH_S", 0.0)
    async with ServiceLink(GatewaySettings(service=ConnectionOptions("127.0.0.1:1"))) as link:
        assert [await link.is_serving() for _ in range(4)] == [was_serving, was_serving, False, False]


async def test_without_a_service_the_gateway_is_not_healthy():
    app = create_app(GatewaySettings(service=ConnectionOptions("127.0.0.1:1")))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert (await http.get("/health")).status_code == 503
        assert (await http.get("/version")).status_code == 200
