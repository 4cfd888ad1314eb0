"""The header with the service's load, in the formats of vLLM and Envoy."""

import base64
import json
from types import SimpleNamespace

import pytest

from penstock.clients.gateway.upstream import load_reports
from penstock.scheduler.config import SchedulerConfig
from penstock.service.auth.identity import Principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.rpc import load_report
from penstock.v1 import orca

FORMAT, LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"


async def load_of(gateway, wanted, path="/v1/completions", **body):
    response = await gateway.post(path, headers={FORMAT: wanted}, **({"prompt": "hi", "max_tokens": 2} | body))
    return response.headers.get(LOAD), response


def fields_of(text):
    """The values of a header in the format TEXT, as vLLM's readers split it."""
    assert text.startswith("TEXT ")
    return {name: float(value) for name, _, value in (each.partition("=") for each in text[5:].split(", "))}


@pytest.fixture
async def loaded(start_gateway, monkeypatch):
    """A service with 3 of 4 rows in use, for as long as the test runs."""
    monkeypatch.setattr(load_reports, "_KEPT_S", 0.0)
    monkeypatch.setattr(load_report, "MAX_AGE_S", 0.0)  # otherwise it may be from before the rows were in use
    gateway = await start_gateway(scheduler=SchedulerConfig(max_num_seqs=4), seconds_per_step=0.002)
    body = {"prompt": "hi", "max_tokens": 4000, "n": 3, "stream": True, "ignore_eos": True}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        assert LOAD not in response.headers  # the request did not ask for it
        await gateway.until(lambda stats: stats.running == 3)
        yield gateway


async def test_text_is_as_in_vllm(loaded):
    for stream in (False, True):
        header, _ = await load_of(loaded, "TEXT", stream=stream)
        fields = fields_of(header)
        assert fields["application_utilization"] >= 0.75
        assert 0 < fields["named_metrics.kv_cache_usage_perc"] < 1
        assert fields["named_metrics.num_requests_waiting"] >= 0
        assert fields["named_metrics.num_requests_running"] >= 3


async def test_json_and_binary_have_the_same_values(loaded):
    header, _ = await load_of(loaded, "json")
    assert header.startswith("JSON ")
    report = json.loads(header[5:])
    _, response = await load_of(loaded, "BIN")
    assert LOAD not in response.headers
    binary = orca.OrcaLoadReport.FromString(base64.b64decode(response.headers[orca.TRAILER]))
    assert set(report["named_metrics"]) == set(binary.named_metrics)
    for utilization in (report["application_utilization"], binary.application_utilization):
        assert utilization >= 0.75


async def test_errors_after_the_caller_is_known_have_it_too(loaded):
    header, response = await load_of(loaded, "TEXT", max_tokens=-1)
    assert response.status_code == 400
    assert fields_of(header)["application_utilization"] >= 0.75


@pytest.mark.parametrize("wanted", ["XML", "TEXT, JSON"])
async def test_an_unknown_format_is_ignored(loaded, wanted):
    header, response = await load_of(loaded, wanted)
    assert (header, response.status_code) == (None, 200)


async def test_a_caller_without_a_key_learns_nothing(start_gateway):
    def check(metadata):
        if dict(metadata).get("authorization") != "Bearer good":
            raise ServiceError(Reason.UNAUTHENTICATED)
        return Principal("acme")

    gateway = await start_gateway(service={"authenticator": SimpleNamespace(authenticate=check)})
    for key, status in (("bad", 401), ("good", 200)):
        headers = {FORMAT: "TEXT", "authorization": f"Bearer {key}"}
        response = await gateway.post("/v1/completions", headers=headers, prompt="hi", max_tokens=2)
        assert response.status_code == status
        assert (LOAD in response.headers) == (status == 200)
    assert LOAD not in (await gateway.http.get("/health", headers={FORMAT: "TEXT"})).headers


async def test_a_service_without_reports_gets_no_header(start_gateway, monkeypatch):
    monkeypatch.setattr(load_reports, "SERVICE", "no.such.Service")
    gateway = await start_gateway()
    header, response = await load_of(gateway, "TEXT")
    assert (header, response.status_code) == (None, 200)


async def test_many_responses_share_a_report(start_gateway, monkeypatch):
    monkeypatch.setattr(load_reports, "_KEPT_S", 3600.0)
    gateway = await start_gateway()
    headers = {(await load_of(gateway, "TEXT"))[0] for _ in range(5)}
    assert len(headers) == 1
