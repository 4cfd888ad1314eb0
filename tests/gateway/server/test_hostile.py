"""Requests that are meant to harm: bodies that never end, too many of them, foreign names, doubtful headers."""

import asyncio
import contextlib
import gc
import hashlib
import json

import pytest
from waiting import until
from wire.raw_http import connected

from penstock.clients.gateway.routes.caller_route import _end_soon
from penstock.clients.gateway.schemas.common import Body
from penstock.clients.gateway.upstream.upstream_request import UpstreamRequest
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.scheduler.config import SchedulerConfig, TenantLimits

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
JSON = {"Content-Type": "application/json"}
ONE, TWO, GATEWAY = "1" * 40, "2" * 40, "g" * 40
MIB = 1 << 20


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path, load_keys):
    lines = [
        f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {rest}"
        for key, rest in ((ONE, "one"), (TWO, "two"), (GATEWAY, "gateway act-for-others"))
    ]
    path = tmp_path / "keys"
    path.write_text("\n".join(lines))
    return {"authenticator": load_keys(path)}


def head(*lines, path=COMPLETIONS):
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", "")).encode()


def whole(**fields):
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


# Bodies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["Content-Length: 2000000", "Transfer-Encoding: chunked"])
async def test_a_body_that_never_ends_gives_way_to_others(start_gateway, framing):
    gateway = await start_gateway(max_bodies_bytes=4 * MIB, max_body_bytes=2 * MIB)
    budget = gateway.app.state.body_budget
    part = b"{" + b" " * (3 * MIB // 2)
    sent = b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in framing else part
    async with connected(gateway) as (reader, writer), connected(gateway) as (_, later):
        writer.write(head(framing) + sent)
        await until(lambda: budget.num_bytes == len(part))
        later.write(head("Content-Length: 1500000") + b" " * MIB)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_too_slow" in answer
        assert b"\r\nconnection: close\r\n" in answer.lower()
        await until(lambda: budget.num_bytes == MIB)
        response = await gateway.http.post(COMPLETIONS, content=whole(), headers=JSON)
        assert response.status_code == 200
    await until(lambda: budget.num_bytes == 0)


async def test_a_tenant_takes_no_others_room(start_gateway, keys):
    gateway = await start_gateway(service=keys, max_bodies_bytes=4 * MIB, max_body_bytes=2 * MIB)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            _, writer = await stack.enter_async_context(connected(gateway))
            writer.write(head(f"Authorization: Bearer {ONE}", "Content-Length: 2000000") + b" " * (MIB * 3 // 4))
        await until(lambda: gateway.app.state.body_budget.num_bytes > MIB)
        body = whole() + b" " * (3 * MIB // 2)
        response = await gateway.http.post(COMPLETIONS, content=body, headers=JSON | bearer(TWO))
        assert response.status_code == 200
        assert gateway.app.state.body_budget.num_bytes <= 2 * MIB


async def test_bodies_that_are_whole_hold_their_room_until_the_service_has_them(start_gateway, monkeypatch):
    gateway = await start_gateway(max_bodies_bytes=2 * MIB, max_body_bytes=MIB)
    may_go_on, accepted = asyncio.Event(), UpstreamRequest.accepted

    async def accepted_later(self):
        await may_go_on.wait()
        await accepted(self)

    monkeypatch.setattr(UpstreamRequest, "accepted", accepted_later)
    body = whole() + b" " * (MIB - 200)
    first = asyncio.create_task(gateway.http.post(COMPLETIONS, content=body, headers=JSON))
    await until(lambda: gateway.app.state.body_budget.num_bytes == len(body))
    refused = await gateway.http.post(COMPLETIONS, content=whole() + b" " * 1000, headers=JSON)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "bodies_full"
    assert "1,048,576 bytes" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"
    may_go_on.set()
    assert (await first).status_code == 200
    await until(lambda: gateway.app.state.body_budget.num_bytes == 0)


def request_bodies():
    """All in memory. Their own class looks into each object, which some do not take well."""
    gc.collect()
    return [each for each in gc.get_objects() if Body in type(each).__mro__]


@pytest.mark.parametrize(
    ("path", "asked", "num_kept"),
    [
        (COMPLETIONS, {"prompt": "a" * 1000}, (0, 0)),
        pytest.param(COMPLETIONS, {"prompt": ["a" * 1000, "b"], "stop": ["x" * 100]}, (0, 0), marks=pytest.mark.soak),
        (COMPLETIONS, {"prompt": "a" * 1000, "return_token_ids": True}, (9000, 9000)),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1000}]}, (0, 0)),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 1000}]}, (0, 0)),
        pytest.param("/v1/responses", {"input": "a" * 1000}, (300, 900), marks=pytest.mark.soak),
        ("/v1/responses", {"input": "a", "metadata": {"m": "m" * 1000}}, (1300, 1900)),
    ],
)
async def test_a_stream_holds_only_what_it_shows_again(start_gateway, path, asked, num_kept):
    gateway = await start_gateway(seconds_per_step=0.01)
    before = {id(each) for each in request_bodies()}
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 4000}
    body = json.dumps(asked | limit | {"stream": True, "temperature": 0}).encode() + b" " * MIB
    async with gateway.http.stream("POST", path, content=body, headers=JSON) as streamed:
        assert streamed.status_code == 200
        await anext(streamed.aiter_raw())
        low, high = num_kept
        assert low <= gateway.app.state.body_budget.num_bytes <= high
        held = [each for each in request_bodies() if id(each) not in before]
        names = ("prompt", "messages", "input", "stop")
        assert [name for each in held for name in names if getattr(each, name, None)] == []
    await until(lambda: gateway.app.state.body_budget.num_bytes == 0)


async def test_a_body_that_gives_way_as_its_time_ends_is_late_and_no_error():
    """Its time cannot be changed any more then."""

    async def receive() -> None:
        async with asyncio.timeout(0.0) as limit:
            try:
                await asyncio.sleep(1000)
            finally:
                _end_soon(limit)

    with pytest.raises(TimeoutError):
        await receive()


async def test_refused_bodies_count_against_the_tenants_rate(start_gateway, keys):
    scheduler = SchedulerConfig(tenants={"one": TenantLimits(requests_per_second=0.001)})
    gateway = await start_gateway(service=keys, scheduler=scheduler)
    first = await gateway.http.post(EMBEDDINGS, content=b"{", headers=JSON | bearer(ONE))
    assert first.status_code == 400
    second = await gateway.http.post(EMBEDDINGS, content=b"{", headers=JSON | bearer(ONE))
    assert second.status_code == 429
    assert second.json()["error"]["code"] == "tenant_rate"
    assert int(second.headers["retry-after"]) > 100
    for _ in range(3):
        other = await gateway.http.post(EMBEDDINGS, content=b"{", headers=JSON | bearer(TWO))
        assert other.status_code == 400
    assert (await gateway.http.get("/v1/models", headers=bearer(ONE))).status_code == 200


async def test_a_named_tenants_own_rate_counts(start_gateway, keys):
    scheduler = SchedulerConfig(tenants={"blue": TenantLimits(requests_per_second=0.001)})
    gateway = await start_gateway(service=keys, scheduler=scheduler, api_key=GATEWAY, tenant_header="x-tenant")
    for tenant, statuses in (("blue", (400, 429)), ("red", (400, 400)), ("blue", (429,))):
        for status in statuses:
            response = await gateway.http.post(EMBEDDINGS, content=b"{", headers=JSON | {"X-Tenant": tenant})
            assert response.status_code == status


async def test_many_large_bodies_of_one_tenant_do_not_keep_others_from_being_parsed(start_gateway, keys):
    gateway = await start_gateway(service=keys)
    bad = b'{"input":[' + b'"",' * 60_000 + b'""]}'
    attack = [
        asyncio.create_task(gateway.http.post(EMBEDDINGS, content=bad, headers=JSON | bearer(ONE))) for _ in range(8)
    ]
    body = whole(prompt="a" * 9000, truncate_prompt_tokens=8)
    response = await gateway.http.post(COMPLETIONS, content=body, headers=JSON | bearer(TWO))
    assert response.status_code == 200, response.text
    assert {answer.status_code for answer in await asyncio.gather(*attack)} == {413}
    assert gateway.app.state.parse_turns.num_waiting == 0


# Headers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("/v1/models", "localhost", 200), ("/v1/models", "LOCALHOST.:1", 200), ("/v1/models", "[::1]:8000", 200),
        ("/v1/models", "llm.example:80", 200), ("/v1/models", "evil.example", 421), ("/metrics", "evil.example", 421),
        ("/", "evil.example", 421), ("/nothing", "evil.example", 421), ("/health", "evil.example", 200),
        ("/version", "evil.example", 200), ("http://evil.example/v1/models", "localhost", 421),
        ("http://localhost:8000/v1/models", "evil.example", 200), ("HTTP://LOCALHOST/version?a=1", "localhost", 200),
        ("http://localhost@evil.example/v1/models", "localhost", 421), ("http://localhost", "localhost", 200),
        ("http://localhost?a", "localhost", 200),
    ],
)  # fmt: skip
async def test_without_keys_only_the_gateways_own_names_are_served(start_gateway, target, host, status):
    gateway = await start_gateway(allowed_hosts=AllowedHosts("127.0.0.1", ("llm.example",)))
    async with connected(gateway) as (reader, writer):
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 421:
        assert b"--allowed-hosts" in answer
        assert b'"code":"invalid_host"' in answer


async def test_http_1_0_needs_no_host(start_gateway):
    gateway = await start_gateway(allowed_hosts=AllowedHosts("127.0.0.1"))
    async with connected(gateway) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_with_keys_any_name_is_served_but_for_metrics(start_gateway, keys):
    hosts, foreign = AllowedHosts("127.0.0.1"), {"Host": "llm.example"}
    gateway = await start_gateway(service=keys, allowed_hosts=hosts)
    assert (await gateway.http.get("/v1/models", headers=foreign | bearer(ONE))).status_code == 200
    assert (await gateway.http.get("/v1/models", headers=foreign)).status_code == 401
    own = await start_gateway(service=keys, allowed_hosts=hosts, api_key=GATEWAY)
    assert (await own.http.get("/v1/models", headers=foreign)).status_code == 421
    for each in (gateway, own):
        assert (await each.http.get("/metrics", headers=foreign)).status_code == 421
        assert (await each.http.get("/metrics")).status_code == 200


async def test_while_the_service_is_gone_any_name_is_answered_as_before(start_gateway, keys, http_before):
    """That it wants keys holds on; where it never answered nobody is told that the name is wrong."""
    hosts, foreign = AllowedHosts("127.0.0.1"), {"Host": "llm.example"}
    gateway = await start_gateway(service=keys, allowed_hosts=hosts, recheck_caller_s=0.0)
    assert (await gateway.http.get("/v1/models", headers=foreign | bearer(ONE))).status_code == 200
    await gateway.service.stop()
    assert (await gateway.http.get("/v1/models", headers=foreign | bearer(ONE))).status_code == 503
    async with http_before("127.0.0.1:1", allowed_hosts=hosts) as (_, http):
        refused = await http.get("/v1/models", headers=foreign)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize("settings", [{}, {"api_key": GATEWAY}])
@pytest.mark.parametrize("shown", [(ONE, TWO), (ONE, ONE), ("wrong", ONE)])
async def test_two_keys_are_none(start_gateway, keys, settings, shown):
    gateway = await start_gateway(service=keys, **settings)
    headers = [("Authorization", f"Bearer {key}") for key in shown]
    response = await gateway.http.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert "Authorization once" in response.json()["error"]["message"]


async def test_a_tenant_header_is_required_if_the_flag_is_set(start_gateway, keys):
    gateway = await start_gateway(service=keys, api_key=GATEWAY, tenant_header="x-tenant", requires_tenant=True)
    for headers, status in (({}, 400), ({"X-Tenant": ""}, 400), ({"X-Tenant": "blue"}, 200)):
        response = await gateway.http.get("/v1/models", headers=headers)
        assert response.status_code == status
    assert (await gateway.http.get("/health")).status_code == 200
