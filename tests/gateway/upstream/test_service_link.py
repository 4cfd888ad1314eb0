"""The way to the service: keys and tenants, callers who go away, a service that comes and goes."""

import asyncio
import hashlib
import itertools
import json
from typing import Any

import openai
import pytest

from penstock.clients.events import Delta, Finished, FinishReason, Timings, Usage, merge
from penstock.clients.gateway.responses.http_response import _events
from penstock.clients.gateway.upstream.upstream_request import UpstreamRequest
from penstock.v1 import generation_pb2 as pb

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
    assert gateway.app.state.link.num_callers == 2


async def test_without_a_good_key_nothing_is_told(start_gateway, keys):
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
    assert gateway.app.state.link.num_callers == 0
    async with openai.AsyncOpenAI(base_url=gateway.base, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_the_gateways_own_key_speaks_for_tenants(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY, tenant_header="x-tenant")
    for headers in ({"X-Tenant": "blue"}, {"X-Tenant": "red"} | bearer("whatever"), {}):
        response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
        assert response.status_code == 200, response.text
    assert tenants == ["blue", "red", "gateway"]
    assert gateway.app.state.link.num_callers == 1
    response = await gateway.post(COMPLETIONS, headers={"X-Tenant": "no spaces"}, prompt="a")
    assert response.status_code == 400


async def test_a_key_of_the_gateways_that_is_refused_is_not_its_callers_fault(start_gateway, keys):
    gateway = await start_gateway(service=keys, api_key="x" * 40)
    response = await gateway.post(COMPLETIONS, prompt="a")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "gateway_key_refused"
    assert "x" * 40 not in response.text


async def test_a_tenant_that_is_named_twice_is_nobody(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY, tenant_header="x-tenant")
    headers = [("X-Tenant", "blue"), ("x-tenant", "red")]  # the caller's own, and one that a proxy added
    response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
    assert response.status_code == 400
    assert "x-tenant must be there once" in response.json()["error"]["message"]
    assert tenants == []


async def test_a_tenant_is_named_by_those_alone_who_may(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, tenant_header="x-tenant")
    for key, status in ((ACME, 403), (GATEWAY, 200)):
        headers = bearer(key) | {"X-Tenant": "blue"}
        response = await gateway.post(COMPLETIONS, headers=headers, prompt="a", max_tokens=1)
        assert response.status_code == status
    assert tenants == ["blue"]


async def test_a_header_that_was_not_asked_for_names_nobody(start_gateway, keys, tenants):
    gateway = await start_gateway(service=keys, api_key=GATEWAY)
    await gateway.post(COMPLETIONS, headers={"X-Tenant": "blue"}, prompt="a", max_tokens=1)
    assert tenants == ["gateway"]


async def test_a_key_that_is_withdrawn_ends_with_the_next_check(start_gateway, keys, monkeypatch):
    gateway = await start_gateway(service=keys, recheck_caller_s=0.0)
    assert (await gateway.post(COMPLETIONS, headers=bearer(ACME), prompt="a")).status_code == 200
    monkeypatch.setattr(keys["authenticator"], "_kinds", ())
    assert (await gateway.post(COMPLETIONS, headers=bearer(ACME), prompt="a")).status_code == 401
    assert gateway.app.state.link.num_callers == 0


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


async def test_only_so_many_tenants_at_once_and_idle_ones_give_way(start_gateway, keys):
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
    assert gateway.app.state.link.num_callers == 2


async def test_a_key_that_gives_way_takes_no_request_with_it_that_comes_just_then(start_gateway):
    gateway = await start_gateway()
    assert (await gateway.post(COMPLETIONS, prompt="a", max_tokens=1)).status_code == 200
    link = gateway.app.state.link
    caller = await link.caller({})
    [place] = link._places.values()
    link._drop(place)
    start = pb.Start(text="a")
    start.sampling.max_tokens = 2
    start.output.format = pb.OUTPUT_FORMAT_TEXT
    upstream_request = UpstreamRequest(caller, [start])
    upstream_request.send_requests()
    try:
        events = [event for _, event in await upstream_request.collect()]
    finally:
        upstream_request.close()
    assert isinstance(events[-1], Finished)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "bc"
    assert place.take_stream() is None  # its own stream goes when it has ended
    while link._closing:  # noqa: ASYNC110 - a moment later
        await asyncio.sleep(0.001)


async def test_many_choices_are_not_merged_with_each_event(monkeypatch):
    class Nobody:
        def carry(self, start, receiver):
            return lambda: None

        def done(self):
            pass

    numbers: list[int] = []

    def note(events):
        numbers.append(len(events))
        return merge(events)

    monkeypatch.setattr("penstock.clients.gateway.upstream.upstream_request.merge", note)
    nobody: Any = Nobody()
    upstream_request = UpstreamRequest(nobody, [pb.Start(sampling=pb.Sampling(n=64))])
    upstream_request.send_requests()
    for at in range(64 * 1000):
        upstream_request.arrive(0, Delta(str(at % 10), [], choice=at % 64))
    upstream_request.arrive(0, Finished(FinishReason.LENGTH, Usage(), Timings()))
    arrivals = await upstream_request.collect()
    assert len(numbers) <= 16
    assert len(arrivals) <= (64 + 16) * 64
    assert sum(len(event.text) for _, event in arrivals if isinstance(event, Delta)) == 64 * 1000
    assert max(len(event.text) for _, event in arrivals if isinstance(event, Delta)) <= 65  # none grows for ever
    upstream_request.close()


async def test_idle_keys_are_forgotten(start_gateway):
    gateway = await start_gateway(idle_caller_s=0.02)
    assert (await gateway.post(COMPLETIONS, headers=bearer("1"), prompt="a")).status_code == 200
    while gateway.app.state.link.num_callers:  # noqa: ASYNC110 - a timer's doing
        await asyncio.sleep(0.005)
    assert (await gateway.post(COMPLETIONS, headers=bearer("1"), prompt="a")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_who_goes_away_costs_nothing_any_more(start_gateway, path, stream):
    gateway = await start_gateway(seconds_per_step=0.005)
    prompt = {"prompt": ["a", "b"]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({**prompt, "n": 2, "max_tokens": 3000, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection(gateway.http.base_url.host, gateway.http.base_url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    await gateway.until(lambda stats: stats.output_tokens > 0)
    writer.close()
    await writer.wait_closed()
    await gateway.until(lambda stats: stats.requests == 0)
    stats = gateway.engine.stats()
    assert stats.output_tokens < 3000
    assert stats.kv_usage == 0
    [place] = gateway.app.state.link._places.values()
    assert place.num_live == 0


async def test_one_who_goes_leaves_the_others_on_the_stream_alone(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.002)
    staying = asyncio.create_task(gateway.post(COMPLETIONS, prompt="a", max_tokens=60))
    async with gateway.http.stream("POST", COMPLETIONS, json={"prompt": "b", "max_tokens": 3000, "stream": True}):
        pass
    response = await staying
    assert len(response.json()["choices"][0]["text"]) == 60
    assert gateway.app.state.link.num_callers == 1


async def test_a_reader_who_is_slow_gets_everything(start_gateway):
    gateway = await start_gateway()
    body = {"prompt": "ab", "max_tokens": 2000, "stream": True}
    text = ""
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        await gateway.until(lambda stats: stats.finished == 1)
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    whole = (await gateway.post(COMPLETIONS, prompt="ab", max_tokens=2000)).json()["choices"][0]["text"]
    assert text == whole


async def test_a_silent_stream_says_that_it_lives(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.15, keepalive_s=0.02)
    response = await gateway.post(COMPLETIONS, prompt="ab", max_tokens=2, stream=True)
    assert (
        "\n\n\n\n" in response.text
    )  # a comment would be joined to the next event by programs that strip what they read
    assert response.text.startswith(("data: ", "\n\n"))
    assert {line for line in response.text.split("\n") if not line.startswith("data: ")} == {""}
    assert response.text.endswith("data: [DONE]\n\n")


def test_an_event_holds_no_line_ends_of_any_kind():
    text = "a\u2028b\u2029c\x85d\ne\rf\x0b\x0c\x1cg\u3002\xc2"
    for chunk in ({"text": text}, {"type": "response.created", "text": text}):
        event = _events([chunk]).decode()
        assert [line.partition(":")[0] for line in event.splitlines() if line] == (
            ["event"] if "type" in chunk else []
        ) + ["data"]
        assert json.loads(event.partition("data: ")[2]) == chunk


async def test_a_silent_stream_may_stay_silent(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.15, keepalive_s=0)
    response = await gateway.post(COMPLETIONS, prompt="ab", max_tokens=2, stream=True)
    assert "\n\n\n" not in response.text


async def test_a_service_that_is_not_there_yet(http_before, start_gateway, free_port):
    async with http_before(f"127.0.0.1:{free_port}") as (_, http):
        response = await http.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert str(free_port) not in response.text
        assert (await http.get("/health")).status_code == 503
        await start_gateway(service={"listen": f"127.0.0.1:{free_port}"})
        while (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        while (await http.get("/health")).status_code == 503:  # noqa: ASYNC110 - that it was not there is kept a moment
            await asyncio.sleep(0.05)
        assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_a_service_that_goes_down_ends_what_it_carries(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.01)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        stopping = asyncio.create_task(gateway.service.stop())
        rest = [line async for line in lines]
    await stopping
    error = json.loads(rest[-4].removeprefix("data: "))["error"]
    assert error["code"] in ("shutdown", "draining", "service_unavailable")
    assert rest[-2] == "data: [DONE]"
    assert (await gateway.post(COMPLETIONS, prompt="a")).status_code == 503


async def test_ids_and_traces_are_passed_on(start_gateway, monkeypatch):
    from penstock.service.requests.lifecycle import RequestLifecycle

    seen = []
    begin = RequestLifecycle.begin_request

    def note(self, start, *rest, **more):
        seen.append(start)
        return begin(self, start, *rest, **more)

    monkeypatch.setattr(RequestLifecycle, "begin_request", note)
    gateway = await start_gateway()
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    for headers in ({"traceparent": trace, "X-Request-Id": "mine"}, {"traceparent": "nonsense", "X-Request-Id": "ö"}):
        response = await gateway.http.post(
            COMPLETIONS,
            content=b'{"prompt": "a", "max_tokens": 1}',
            headers={"Content-Type": "application/json", **{k: v.encode() for k, v in headers.items()}},
        )
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert [(start.traceparent, start.client_request_id) for start in seen] == [(trace, "mine"), ("", "")]


async def test_names_of_tokens_are_asked_for_once(start_gateway, monkeypatch):
    from penstock.service.rpc.tokenizer import TokenizerService

    asked = []
    describe = TokenizerService.DescribeTokens

    async def note(self, request, context):
        asked.extend(request.token_ids)
        return await describe(self, request, context)

    monkeypatch.setattr(TokenizerService, "DescribeTokens", note)
    gateway = await start_gateway()
    for _ in range(2):
        await gateway.post(COMPLETIONS, prompt="ab", max_tokens=3, logprobs=0)
    assert asked == [ord("c"), ord("d"), ord("e")]


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
    assert link.num_callers == 4
    for place in link._places.values():
        while place.num_live:  # noqa: ASYNC110 - who went away is noticed soon
            await asyncio.sleep(0.001)
    while "penstock-gateway-watch" in {task.get_name() for task in asyncio.all_tasks()}:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0.001)
