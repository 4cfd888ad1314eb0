"""The metrics at the gateway's address: its own, and the service's."""

import asyncio
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from penstock.clients.gateway.routes import metrics
from penstock.clients.gateway.routes.metrics import _fetch

NOWHERE = "127.0.0.1:1"
DOCS = Path(__file__).parents[3] / "docs/http.md"
FORMS = pytest.mark.parametrize(
    ("parse", "accept", "kind"),
    [
        (parse_text, "*/*", "text/plain"),
        (parse_openmetrics, "application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    ],
)


def samples_of(page, parse=parse_text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse(page)
        for sample in family.samples
    }


def requests_of(samples):
    """By route and code."""
    return {
        tuple(value for _, value in sorted(labels, reverse=True)): count
        for (name, *labels), count in samples.items()
        if name == "penstock_gateway_requests_total"
    }


@FORMS
async def test_the_services_page_is_shown_without_tenants_beside_the_gateways(
    start_gateway, http_before, parse, accept, kind
):
    behind = await start_gateway(service={"metrics_listen": "127.0.0.1:0"})
    await behind.post("/v1/completions", model="bytes", prompt="hi", max_tokens=4)
    async with http_before(NOWHERE, metrics_target=behind.service.metrics_target) as (_, http):
        answer = await http.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    families = list(parse(answer.text))
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 4
    assert samples["penstock_steps_total"] > 0
    assert samples["penstock_gateway_has_service_metrics"] == 1
    assert samples["penstock_gateway_live_requests"] == 1
    assert 'tenant="' not in answer.text
    assert len({family.name for family in families}) == len(families)


@FORMS
@pytest.mark.parametrize("target", ["", NOWHERE])
async def test_without_the_services_page_the_gateways_own_is_shown(http_before, parse, accept, kind, target):
    async with http_before(NOWHERE, metrics_target=target) as (_, http):
        answer = await http.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    samples = samples_of(answer.text, parse)
    assert samples["penstock_gateway_has_service_metrics",] == 0
    assert samples["penstock_gateway_connections",] == 1


async def test_the_services_page_is_read_under_any_name_of_the_service(monkeypatch):
    """It is served to this machine's names alone."""
    hosts: list[str | None] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            hosts.append(self.headers["host"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"penstock_steps_total 1\n")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", server.server_address)])
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        page = await asyncio.to_thread(_fetch, f"penstock.ns.example:{server.server_port}", "")
        serving.join()
    assert page is not None
    assert hosts == ["localhost"]


async def test_many_who_ask_at_once_get_one_page(http_before, monkeypatch):
    asked: list[str] = []

    def fetch(target, accepted):
        asked.append(accepted)

    monkeypatch.setattr(metrics, "_fetch", fetch)
    async with http_before(NOWHERE, metrics_target=NOWHERE) as (_, http):
        versions = [f"application/openmetrics-text; version=1.0.{number}" for number in range(20)]
        answers = await asyncio.gather(
            *(http.get("/metrics", headers={"accept": each}) for each in ("*/*", *versions)),
        )
    assert {each.status_code for each in answers} == {200}
    assert len(asked) == 2  # one of each form


async def test_requests_are_counted_by_route_and_status(gateway):
    await gateway.post("/v1/completions", prompt="hi", max_tokens=4)
    await gateway.chunks("/v1/completions", prompt="hi", max_tokens=4)
    await gateway.post("/v1/completions", prompt="hi", max_tokens=-1)
    for name in ("bytes", "other", "a/name/with/slashes"):
        await gateway.http.get(f"/v1/models/{name}")
    for path in ("/a", "/b"):
        await gateway.http.get(path)
    samples = samples_of((await gateway.http.get("/metrics")).text)
    assert requests_of(samples) == {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "400"): 1,
        ("/v1/models/{name:path}", "200"): 1,
        ("/v1/models/{name:path}", "404"): 2,
        ("other", "404"): 2,
    }
    assert samples["penstock_gateway_request_duration_seconds_count", ("route", "/v1/completions")] == 3
    assert samples["penstock_gateway_live_requests",] == 1


async def test_a_caller_that_leaves_is_counted_and_not_live_any_more(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.01)
    body = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as streamed:
        assert streamed.status_code == 200
        samples = samples_of((await gateway.http.get("/metrics")).text)
        assert samples["penstock_gateway_live_requests",] == 2
    while samples["penstock_gateway_live_requests",] != 1:
        samples = samples_of((await gateway.http.get("/metrics")).text)
    assert requests_of(samples)["/v1/completions", "200"] == 1


async def test_every_metric_is_documented(gateway):
    shown = {family.name for family in parse_text((await gateway.http.get("/metrics")).text)}
    documented = {
        name.removesuffix("_total")
        for name in re.findall(r"^\| `(penstock_gateway_\w+)`", DOCS.read_text(), re.MULTILINE)
    }
    assert documented == shown
