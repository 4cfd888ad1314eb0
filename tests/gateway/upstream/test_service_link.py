"""The link to the service: callers that disconnect, slow and silent streams, a service that stops and comes back."""

import asyncio
import json
from typing import Any

import pytest
from starlette.datastructures import Headers

import penstock.v1 as pb
from penstock.clients.events import Delta, Finished, FinishReason, Timings, Usage, merge
from penstock.clients.gateway.responses.http_response import _events
from penstock.clients.gateway.upstream.upstream_request import UpstreamRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def test_a_key_that_gives_way_takes_no_request_with_it_that_comes_just_then(start_gateway):
    gateway = await start_gateway()
    assert (await gateway.post(COMPLETIONS, prompt="a", max_tokens=1)).status_code == 200
    link = gateway.app.state.link
    caller = await link.caller(Headers())
    [place] = link._places.values()
    link._drop(place)
    start = pb.GenerationStart(text="a")
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
    upstream_request = UpstreamRequest(nobody, [pb.GenerationStart(sampling=pb.SamplingParams(n=64))])
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


async def test_a_departing_caller_does_not_affect_others_on_the_stream(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.002)
    staying = asyncio.create_task(gateway.post(COMPLETIONS, prompt="a", max_tokens=60))
    async with gateway.http.stream("POST", COMPLETIONS, json={"prompt": "b", "max_tokens": 3000, "stream": True}):
        pass
    response = await staying
    assert len(response.json()["choices"][0]["text"]) == 60
    assert len(gateway.app.state.link._places) == 1


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


async def test_a_silent_stream_sends_keepalives(start_gateway):
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
    from penstock.service.requests.live.lifecycle import RequestLifecycle

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


async def test_only_tokens_without_log_probabilities_are_described_each_once(start_gateway, monkeypatch):
    from penstock.service.rpc.tokenizer import TokenizerService

    asked = []
    describe = TokenizerService.DescribeTokens

    async def note(self, request, context):
        asked.extend(request.token_ids)
        return await describe(self, request, context)

    monkeypatch.setattr(TokenizerService, "DescribeTokens", note)
    gateway = await start_gateway()
    for _ in range(2):
        body = {"prompt": "ab", "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 2, "echo": True}
        [choice] = (await gateway.post(COMPLETIONS, **body)).json()["choices"]
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d", "e"]
        messages = [{"role": "user", "content": "a"}]
        await gateway.post("/v1/chat/completions", messages=messages, max_tokens=3, logprobs=True, top_logprobs=2)
    assert asked == [ord("a")]  # the first token of an echoed prompt
