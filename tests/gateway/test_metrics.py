"""The service's metrics at the gateway's address."""

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("parse", "accept", "kind"),
    [
        (parse_text, "*/*", "text/plain"),
        (parse_openmetrics, "application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
    ],
)
async def test_the_services_page_is_shown_without_tenants(start_gateway, http_before, parse, accept, kind):
    behind = await start_gateway(service={"metrics_listen": "127.0.0.1:0"})
    await behind.post("/v1/completions", model="bytes", prompt="hi", max_tokens=4)
    async with http_before(NOWHERE, metrics_target=behind.service.metrics_target) as (_, http):
        answer = await http.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    samples = {sample.name: sample.value for family in parse(answer.text) for sample in family.samples}
    assert samples["vllm:generation_tokens_total"] == 4
    assert samples["penstock_steps_total"] > 0
    assert "tenant" not in answer.text


async def test_a_gateway_that_knows_of_no_page_says_so(gateway):
    answer = await gateway.http.get("/metrics")
    assert answer.status_code == 404
    assert "--metrics-target" in answer.json()["error"]["message"]


async def test_a_page_that_cannot_be_read_is_503(http_before):
    async with http_before(NOWHERE, metrics_target=NOWHERE) as (_, http):
        answer = await http.get("/metrics")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the service's metrics cannot be read; try again"
