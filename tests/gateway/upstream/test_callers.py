"""Keys and tenants of callers reach the service; the number of callers is limited, and idle ones give way."""

import asyncio
import contextlib
import hashlib
import itertools

import openai
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ACME, OTHER, GATEWAY = "a" * 40, "o" * 40, "g" * 40


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path, load_keys):
    """What the service knows: tenants `1` to `4` have two keys each, such as `1` and `1b`."""
    known = [(ACME, "acme"), (OTHER, "other"), (GATEWAY, "gateway act-for-others")]
    known += [(f"{tenant}{which}", tenant) for tenant in "1234" for which in ("", "b")]
    lines = [f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {rest}" for key, rest in known]
    path = tmp_path / "keys"
    path.write_text("\n".join(lines))
    return {"authenticator": load_keys(path)}


@pytest.fixture
def tenants(monkeypatch):
    """The tenants of the requests that reach the engine."""
    from penstock.scheduler.loop.engine import Engine

    seen = []
    submit = Engine.submit

    def note(self, request, *rest, **more):
        seen.append(request.tenant)
        return submit(self, request, *rest, **more)

    monkeypatch.setattr(Engine, "submit", note)
    return seen


async def test_each_callers_key_reaches_the_service(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys)
    for key in (ACME, OTHER, ACME):
        response = await gateway.post(COMPLETIONS, headers=bearer(key), prompt="a", max_tokens=1)
        assert response.status_code == 200, response.text
    assert tenants == ["acme", "other", "acme"]
    assert len(gateway.app.state.link._places) == 2


async def test_nothing_is_revealed_without_a_valid_key(start_gateway, keys):
    gateway = await start_gateway(service=keys)
    shown: tuple[dict[str, str], ...] = (
        {},
        bearer("x" * 40),
        {"Authorization": f"Basic {ACME}"},
        {"Authorization": ACME},
        bearer("k" * 5000),
    )
    for headers, (method, path, content) in itertools.product(
        shown,
        (
            ("POST", COMPLETIONS, b'{"prompt": "a"}'),
            ("POST", CHAT, b"no JSON at all"),
            ("POST", CHAT, b'{"model": "another"}'),
            ("GET", "/v1/models", b""),
        ),
    ):
        sent = headers | {"Content-Type": "application/json"}
        response = await gateway.http.request(method, path, content=content, headers=sent)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert not gateway.app.state.link._places
    async with openai.AsyncOpenAI(base_url=gateway.base, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_the_gateways_own_key_speaks_for_tenants(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY, tenant_header="x-tenant")
    for headers in ({"X-Tenant": "blue"}, {"X-Tenant": "red"} | bearer("whatever"), {}):
        response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
        assert response.status_code == 200, response.text
    assert tenants == ["blue", "red", "gateway"]
    assert len(gateway.app.state.link._places) == 1
    response = await gateway.post(COMPLETIONS, headers={"X-Tenant": "no spaces"}, prompt="a")
    assert response.status_code == 400


async def test_a_key_of_the_gateways_that_is_refused_is_not_its_callers_fault(start_gateway, keys):
    gateway = await start_gateway(service=keys, api_key="x" * 40)
    response = await gateway.post(COMPLETIONS, prompt="a")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "gateway_key_refused"
    assert "x" * 40 not in response.text


async def test_a_repeated_tenant_header_is_refused(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY, tenant_header="x-tenant")
    headers = [("X-Tenant", "blue"), ("x-tenant", "red")]  # the caller's own, and one that a proxy added
    response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
    assert response.status_code == 400
    assert "header x-tenant only once" in response.json()["error"]["message"]
    assert tenants == []


async def test_only_authorized_callers_may_name_a_tenant(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, tenant_header="x-tenant")
    for key, status in ((ACME, 403), (GATEWAY, 200)):
        headers = bearer(key) | {"X-Tenant": "blue"}
        response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
        assert response.status_code == status
    assert tenants == ["blue"]


async def test_an_unconfigured_tenant_header_is_ignored(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY)
    await gateway.post(COMPLETIONS, headers={"X-Tenant": "blue"}, prompt="a", max_tokens=1)
    assert tenants == ["gateway"]


async def test_a_key_that_is_withdrawn_ends_with_the_next_check(start_gateway, keys, monkeypatch):
    gateway = await start_gateway(service=keys, recheck_caller_s=0.0)
    assert (await gateway.post(COMPLETIONS, headers=bearer(ACME), prompt="a")).status_code == 200
    monkeypatch.setattr(keys["authenticator"], "_kinds", ())
    assert (await gateway.post(COMPLETIONS, headers=bearer(ACME), prompt="a")).status_code == 401
    assert not gateway.app.state.link._places


@pytest.mark.parametrize(
    ("settings", "status", "code"),
    [({}, 401, "invalid_api_key"), ({"api_key": GATEWAY}, 503, "gateway_key_refused")],
    ids=["the callers'", "the gateway's"],
)
async def test_what_runs_under_a_key_that_is_withdrawn_ends_as_the_check_did(
    start_gateway, keys, monkeypatch, settings, status, code
):
    gateway = await start_gateway(service=keys, recheck_caller_s=0.0, seconds_per_step=0.005, **settings)
    body = {"prompt": "a", "max_tokens": 4000}
    running = asyncio.create_task(gateway.post(COMPLETIONS, headers=bearer(ACME), **body))
    await gateway.until(lambda stats: stats.output_tokens > 0)
    monkeypatch.setattr(keys["authenticator"], "_kinds", ())
    refused = await gateway.post(COMPLETIONS, headers=bearer(ACME), **body)
    ended = await running
    for response in (refused, ended):
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ended.json() == refused.json()
    assert ended.headers["x-request-id"] != refused.headers["x-request-id"]


async def test_concurrent_tenants_are_limited_and_idle_ones_give_way(start_gateway, keys):
    gateway = await start_gateway(max_callers=2, seconds_per_step=0.01, service=keys)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    async with gateway.http.stream("POST", COMPLETIONS, json=body, headers=bearer("1")) as first:
        assert first.status_code == 200
        for key in "23":  # 2 gives way to 3
            response = await gateway.post(COMPLETIONS, headers=bearer(key), prompt="a", max_tokens=1)
            assert response.status_code == 200
        async with gateway.http.stream("POST", COMPLETIONS, json=body, headers=bearer("3")) as second:
            assert second.status_code == 200
            response = await gateway.post(COMPLETIONS, headers=bearer("4"), prompt="a")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "gateway_full"
            assert response.headers["retry-after"]
            for key in ("1b", "3b"):  # a tenant's keys share its place
                response = await gateway.post(COMPLETIONS, headers=bearer(key), prompt="a", max_tokens=1)
                assert response.status_code == 200
    assert len(gateway.app.state.link._places) == 2


async def test_the_tenants_that_a_key_acts_for_share_its_place(start_gateway, keys):
    gateway = await start_gateway(max_callers=1, seconds_per_step=0.01, service=keys)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    async with contextlib.AsyncExitStack() as stack:
        for tenant in ("blue", "red", "green", "blue"):
            headers = bearer(GATEWAY) | {"x-llm-d-inference-fairness-id": tenant}
            streamed = gateway.http.stream("POST", COMPLETIONS, json=body, headers=headers)
            assert (await stack.enter_async_context(streamed)).status_code == 200


async def test_idle_keys_are_forgotten(start_gateway):
    gateway = await start_gateway(idle_caller_s=0.02)
    assert (await gateway.post(COMPLETIONS, headers=bearer("1"), prompt="a")).status_code == 200
    while gateway.app.state.link._places:  # noqa: ASYNC110 - a timer's doing
        await asyncio.sleep(0.005)
    assert (await gateway.post(COMPLETIONS, headers=bearer("1"), prompt="a")).status_code == 200


async def test_many_come_and_go_and_nothing_is_left(start_gateway, keys):
    gateway = await start_gateway(seconds_per_step=0.002, service=keys)

    async def call(number):
        """Every third goes away: before the first token, in the middle, or just before the end."""
        body = {"prompt": ["ab"] * (1 + number % 2), "n": 1 + number % 3, "max_tokens": 20, "stream": True}
        text = b""
        async with gateway.http.stream("POST", COMPLETIONS, json=body, headers=bearer(str(1 + number % 4))) as response:
            async for part in response.aiter_raw():
                text += part
                if number % 3 == 0 and text.count(b"data:") >= number:
                    return
        assert text.endswith(b"data: [DONE]\n\n")

    await asyncio.gather(*map(call, range(48)))
    await gateway.until(lambda stats: stats.requests == 0)
    assert gateway.engine.stats().kv_usage == 0
    link = gateway.app.state.link
    assert len(link._places) == 4
    for place in link._places.values():
        while place.num_live:  # noqa: ASYNC110 - who went away is noticed soon
            await asyncio.sleep(0.001)
    while "penstock-gateway-watch" in {task.get_name() for task in asyncio.all_tasks()}:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)
