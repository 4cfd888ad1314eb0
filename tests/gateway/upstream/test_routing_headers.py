"""Headers from gateways in front of this one reach the scheduler. Each test fails if its header is ignored."""

import hashlib

import pytest
from wire.routing import ADMITTED, KEY, PLAIN, write_keys

from penstock.scheduler.loop.engine import Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def submitted(monkeypatch):
    """The requests that reach an engine."""
    seen = []
    submit = Engine.submit

    def note(self, request):
        seen.append(request)
        submit(self, request)

    monkeypatch.setattr(Engine, "submit", note)
    return seen


@pytest.fixture
async def gateway(start_gateway, tmp_path, load_keys):
    return await start_gateway(service={"authenticator": load_keys(write_keys(tmp_path))}, objectives={"batch": 10})


def headers(key=KEY, **others):
    return {"authorization": f"Bearer {key}"} | {name.replace("_", "-"): value for name, value in others.items()}


async def test_each_header_reaches_the_scheduler(gateway, submitted):
    for name, (value, is_there) in ADMITTED.items():
        given = headers(**{name: value})
        response = await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1)
        assert response.status_code == 200, response.text
        messages = [{"role": "user", "content": "hi"}]
        response = await gateway.post(CHAT, headers=given, messages=messages, max_tokens=1)
        assert response.status_code == 200, response.text
        assert [bool(is_there(request)) for request in submitted] == [True] * 2, name
        submitted.clear()


async def test_a_field_of_the_body_wins(gateway, submitted):
    given = headers(x_llm_d_inference_objective="batch", x_request_id="header")
    await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1, priority=3, request_id="body")
    assert (submitted[0].priority, submitted[0].client_request_id) == (3, "body")


async def test_a_key_that_may_not_act_for_others_stays_itself(gateway, submitted):
    given = headers(PLAIN, x_llm_d_inference_fairness_id="acme")
    assert (await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1)).status_code == 200
    assert submitted[0].tenant == "plain"


async def test_the_key_and_its_tenants_are_checked_once(gateway, monkeypatch):
    calls = []
    link = gateway.app.state.link
    fetch = link._fetch_model

    def note(metadata, tenant):
        calls.append(tenant)
        return fetch(metadata, tenant)

    monkeypatch.setattr(link, "_fetch_model", note)
    for tenant in ("acme", "bolt", "acme", "bolt"):
        given = headers(x_llm_d_inference_fairness_id=tenant)
        await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1)
    assert calls == ["", "acme", "bolt"]


async def test_under_the_gateways_own_key_only_the_operators_header_counts(
    start_gateway, tmp_path, load_keys, submitted
):
    (tmp_path / "keys").write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} gateway act-for-others")
    service = {"authenticator": load_keys(write_keys(tmp_path))}
    given = {"x-tenant": "bolt", "x-llm-d-inference-fairness-id": "acme"}
    for tenant_header in ("", "x-tenant", "x-llm-d-inference-fairness-id"):
        gateway = await start_gateway(service=service, api_key=KEY, tenant_header=tenant_header)
        await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1)
    assert [request.tenant for request in submitted] == ["gateway", "bolt", "acme"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-inference-fairness-id"])
async def test_an_invalid_value_is_refused_by_its_name(gateway, name):
    given = headers(**{name: "no such thing"})
    response = await gateway.post(COMPLETIONS, headers=given, prompt="a", max_tokens=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert response.json()["error"]["code"] == "invalid_header"


async def test_embeddings_have_their_tenant_and_priority(gateway, submitted):
    given = headers(x_llm_d_inference_fairness_id="acme", x_llm_d_inference_objective="batch")
    response = await gateway.post("/v1/embeddings", headers=given, input="a")
    assert response.status_code == 200, response.text
    assert (submitted[0].tenant, submitted[0].priority) == ("acme", 10)


async def test_a_first_token_that_would_be_late_is_refused_with_429(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.05)
    await gateway.post(COMPLETIONS, prompt="a", max_tokens=8)
    response = await gateway.post(COMPLETIONS, headers={"x-slo-ttft-ms": "1"}, prompt="a", max_tokens=1)
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "overloaded"
    assert "its first token would come in" in response.json()["error"]["message"]
    response = await gateway.post(COMPLETIONS, headers={"x-slo-ttft-ms": "60000"}, prompt="a", max_tokens=1)
    assert response.status_code == 200
