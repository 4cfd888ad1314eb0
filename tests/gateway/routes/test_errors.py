"""Requests that are wrong or cannot be served now: the response has the code, OpenAI's shape, the field and a hint."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from penstock.clients.gateway.errors import ErrorBody, from_validation
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.request import Change

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "a" * 4000}]


def error_of(response):
    """The error of an answer, whose shape is checked."""
    ErrorBody.model_validate(response.json(), extra="forbid")
    assert response.headers["x-request-id"]
    return response.json()["error"]


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "\ud800": 1}, None),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    (COMPLETIONS, {"prompt": [300]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [[1], [2, 999_999_999]], "echo": True}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": -0.1}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": None, "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0, "echo": True}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 4097, "return_token_ids": True}, "truncate_prompt_tokens"),
    (CHAT, {"messages": HELLO, "truncation_side": "middle"}, "truncation_side"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 65}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 2**32 - 1}, "n"),
    (CHAT, {"messages": HELLO, "n": 2**32 - 1}, "n"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"٣": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HELLO, {"role": "User", "content": "a"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages[0].content[0]",
    ),
    (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": HELLO, "guided_regex": "(?=a)"}, "guided_regex"),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "ignore_eos": True}, "guided_regex"),
    (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {"not": {}}}, "guided_json"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, "functions"),
    (CHAT, {"messages": HELLO, "echo": True}, "echo"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ x }}"}, "chat_template"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
]
"""Path, body, and the field that is to be named."""


async def test_what_is_wrong_is_named(gateway, subtests):
    for path, body, param in WRONG:
        with subtests.test(str(body)):
            content = json.dumps(body).encode()
            response = await gateway.http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400, response.text
            error = error_of(response)
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
            assert "sampling." not in error["message"]


TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a" * 4096}, "prompt"),
    (COMPLETIONS, {"prompt": [97] * 4096}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 4096, "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 4095}, "prompt"),
    (COMPLETIONS, {"prompt": [97] * 4095}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "a" * 4081]}, "prompt[1]"),
    (CHAT, {"messages": LONG * 2}, "messages"),
    (CHAT, {"messages": LONG * 2, "return_token_ids": True}, "messages"),
]
"""Path, body, and the field that is to be named; the context has 4,096 tokens."""


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_is_too_long_for_the_context_has_openais_code(gateway, path, body, param):
    response = await gateway.post(path, **body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(f"{param}: ")


MANY: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": ["a", *[1] * 5000]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "stop": [1] * 5000}, "stop"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": ["x"] * 5000}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}, "logit_bias"),
    (CHAT, {"messages": [1] * 5000}, "messages"),
    (CHAT, {"messages": HELLO * 5000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [1] * 5000}]}, "messages"),
    (CHAT, {"messages": HELLO, "tools": [1] * 5000}, "tools"),
    (CHAT, {"messages": HELLO, "documents": [1] * 5000}, "documents"),
    ("/v1/responses", {"input": [1] * 5000}, "input"),
    ("/v1/responses", {"input": "a", "metadata": {str(i): 1 for i in range(5000)}}, "metadata"),
    ("/tokenize", {"messages": [1] * 5000}, "messages"),
]
"""Path, a body with something wrong thousands of times, and the field."""


async def test_repeated_validation_errors_are_reported_once(gateway, monkeypatch, subtests):
    numbers: list[int] = []

    def note(errors: Any) -> Any:
        numbers.append(len(errors))
        return from_validation(errors)

    monkeypatch.setattr("penstock.clients.gateway.errors.from_validation", note)
    for path, body, field in MANY:
        with subtests.test(f"{path} {field}"):
            response = await gateway.post(path, **body)
            assert response.status_code == 400, response.text
            assert error_of(response)["param"].partition("[")[0] == field
    assert len(numbers) == len(MANY)
    assert max(numbers) <= 5  # one for each member of a union


async def test_what_is_nested_too_deeply_is_the_callers_fault(gateway):
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"x": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response = await gateway.post("/tokenize", messages=HELLO, tools=[tool])
    assert response.status_code == 400
    error_of(response)


async def test_a_name_as_long_as_a_body_is_compared_by_its_beginning(gateway, monkeypatch):
    compared: list[str] = []

    def note(name: str, *_: object, **__: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("difflib.get_close_matches", note)
    error = error_of(await gateway.post(COMPLETIONS, **{"prompt": "a", "x" * 100_000: 1}))
    assert error["param"].endswith("x...")
    assert [len(name) for name in compared] == [60]


async def test_prompts_that_are_too_large_with_their_options(gateway, monkeypatch):
    monkeypatch.setattr("penstock.clients.gateway.routes.completions._MAX_STARTS_BYTES", 1000)
    options = {"stop_token_ids": [255] * 200, "max_tokens": 1}
    assert (await gateway.post(COMPLETIONS, prompt=["a"] * 2, **options)).status_code == 200
    response = await gateway.post(COMPLETIONS, prompt=["a"] * 5, **options)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


async def test_what_the_services_transport_would_refuse_is_too_large(gateway):
    response = await gateway.post("/tokenize", prompt="a" * (9 << 20))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


async def test_fields_that_change_nothing_are_passed_over(gateway):
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "x"}
    neutral = {"length_penalty": 1.0, "use_beam_search": False, "response_format": {"type": "text"}, "verbosity": None}
    response = await gateway.post(CHAT, messages=HELLO, max_tokens=1, **ignored, **neutral)
    assert response.status_code == 200, response.text


async def test_a_name_that_is_nearly_one_gets_a_hint(gateway):
    error = error_of(await gateway.post(COMPLETIONS, prompt="a", temprature=1))
    assert error["message"] == "temprature: unknown field; did you mean temperature?"


async def test_a_model_that_is_not_served(gateway):
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        response = await gateway.post(path, model="gpt-5", **body)
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"


async def test_a_body_that_is_none(gateway):
    for content, kind, status in (
        (b'{"prompt": ', "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"", "application/json", 400),
        (b"prompt=a", "application/x-www-form-urlencoded", 415),
    ):
        response = await gateway.http.post(COMPLETIONS, content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        error_of(response)


async def test_paths_and_methods_that_are_none(gateway):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", COMPLETIONS, 405), ("POST", "/v1/models", 405)):
        response = await gateway.http.request(method, path)
        assert response.status_code == status
        error_of(response)


async def test_a_body_that_is_too_large(start_gateway):
    gateway = await start_gateway(max_body_bytes=1000)

    async def parts():
        for _ in range(20):
            yield b" " * 100

    for body in (b" " * 1001, parts()):
        headers = {"Content-Type": "application/json"}
        response = await gateway.http.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == 413
        assert "1,000 bytes" in error_of(response)["message"]


async def test_a_body_that_does_not_arrive(start_gateway):
    gateway = await start_gateway(body_timeout_s=0.05)
    reader, writer = await asyncio.open_connection(gateway.http.base_url.host, gateway.http.base_url.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
    writer.write(head.encode())
    assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_who_sends_no_whole_head_of_a_request_holds_no_place(start_gateway, monkeypatch):
    monkeypatch.setattr("penstock.clients.gateway.server.http_server._HEAD_S", 0.05)
    gateway = await start_gateway(seconds_per_step=0.01)
    base = gateway.http.base_url
    whole = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    for sent, answered in (("", b""), (whole[:-4], b""), (whole + whole[:-4], b"HTTP/1.1 200")):
        reader, writer = await asyncio.open_connection(base.host, base.port)
        writer.write(sent.encode())
        assert (await asyncio.wait_for(reader.read(), 120)).startswith(answered)
        writer.close()
        await writer.wait_closed()
    response = await gateway.post(COMPLETIONS, prompt="a", max_tokens=20)  # an answer takes what it takes
    assert len(response.json()["choices"][0]["text"]) == 20


async def test_a_full_queue_gives_a_retry_delay(start_gateway):
    scheduler = SchedulerConfig(max_num_seqs=1, max_queued_requests=1)
    gateway = await start_gateway(scheduler=scheduler, seconds_per_step=0.01)
    body = {"prompt": "a", "max_tokens": 1000, "stream": True}
    async with (
        gateway.http.stream("POST", COMPLETIONS, json=body) as running,
        gateway.http.stream("POST", COMPLETIONS, json=body) as waiting,
    ):
        assert running.status_code == waiting.status_code == 200
        for path, fields in ((COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, {"prompt": "a", "stream": True})):
            response = await gateway.post(path, **fields)
            assert response.status_code == 429
            assert error_of(response)["code"] == "queue_full"
            assert error_of(response)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert response.headers["x-should-retry"] == "true"
        async with openai.AsyncOpenAI(base_url=gateway.base, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="bytes", prompt="a")


async def test_a_deadline_that_passes(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.02, request_timeout_s=0.3)
    response = await gateway.post(COMPLETIONS, prompt="a", max_tokens=4000)
    assert response.status_code == 504
    assert error_of(response)["code"] == "deadline"


async def test_a_deadline_that_passes_amid_a_stream(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.02)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    chunks: list[dict[str, Any]] = []
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == 1:
                request_id = response.headers["x-request-id"]
                assert gateway.engine.update(request_id, Change(deadline=time.monotonic()))
    assert chunks[0]["choices"][0]["text"]
    assert chunks[-1]["error"]["code"] == "deadline"


async def test_a_worker_that_is_down_is_503(start_gateway):
    gateway = await start_gateway(scheduler=SchedulerConfig())
    gateway.executor.may_start.clear()
    gateway.executor.die()
    await gateway.until(lambda stats: stats.state.name != "SERVING")
    response = await gateway.post(COMPLETIONS, prompt="a")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    gateway.executor.may_start.set()


async def test_a_bug_is_reported_without_the_callers_text(gateway, monkeypatch, caplog):
    canary = "CANARY-7f3a"

    def broken(*_: object) -> None:
        raise KeyError(canary)

    monkeypatch.setattr("penstock.clients.gateway.routes.completions.fill_sampling", broken)
    response = await gateway.post(COMPLETIONS, prompt=canary)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal"
    assert canary not in response.text
    assert canary not in caplog.text
    assert "KeyError in the gateway" in caplog.text
