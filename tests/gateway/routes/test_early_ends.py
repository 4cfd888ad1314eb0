"""Streamed answers whose requests end early: their callers get the text of all tokens, and then the error."""

import json
from typing import Any

import anthropic
import pytest
from waiting import until

from penstock.scheduler.request import EngineFinishReason

HELD = "S" * 900
"""A stop string: any number of its characters may be held back as its beginning."""


def says_letters(history, sampling):
    return ord("S")


async def cut_short(gateway, path, **body):
    """The events of a stream whose request reaches its deadline while all of its output is held back, and the number of
    tokens."""
    async with gateway.http.stream("POST", path, json=body | {"stream": True}) as response:
        await until(lambda: gateway.engine.stats().output_tokens > 20)
        gateway.engine.abort(response.headers["x-request-id"], EngineFinishReason.DEADLINE)
        num_tokens = gateway.engine.stats().output_tokens
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")], num_tokens


@pytest.fixture
async def slow_gateway(start_gateway):
    return await start_gateway(says_letters, seconds_per_step=0.002)


async def test_a_completion(slow_gateway):
    events, num_tokens = await cut_short(slow_gateway, "/v1/completions", prompt="x", stop=HELD, max_tokens=800)
    *chunks, failed = events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "S" * num_tokens
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert failed["error"]["type"] == "timeout_error"


async def test_a_chat(slow_gateway):
    messages = [{"role": "user", "content": "x"}]
    events, num_tokens = await cut_short(
        slow_gateway, "/v1/chat/completions", messages=messages, stop=HELD, max_tokens=800
    )
    *chunks, failed = events
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "S" * num_tokens
    assert failed["error"]["type"] == "timeout_error"


async def test_a_message(slow_gateway):
    """Anthropic's client reads it."""
    body: dict[str, Any] = {"model": "bytes", "max_tokens": 800, "messages": [{"role": "user", "content": "x"}]}
    async with (
        anthropic.AsyncAnthropic(base_url=str(slow_gateway.http.base_url), api_key="none") as client,
        client.messages.stream(**body, stop_sequences=[HELD]) as stream,
    ):
        await until(lambda: slow_gateway.engine.stats().output_tokens > 20)
        slow_gateway.engine.abort(stream.request_id, EngineFinishReason.DEADLINE)
        num_tokens = slow_gateway.engine.stats().output_tokens
        with pytest.raises(anthropic.APIStatusError) as caught:
            await stream.until_done()
        blocks = stream.current_message_snapshot.content
    assert "".join(getattr(block, "text", "") for block in blocks) == "S" * num_tokens
    assert caught.value.type == "timeout_error"


async def test_a_response(start_gateway):
    """Tests calls, which may have parts that are held back, without stop strings."""

    def says_spaces(history, sampling):
        return ord("<" if not len(history) % 50 else " ")

    gateway = await start_gateway(says_spaces, seconds_per_step=0.002, service={"reasoning_parser": "think"})
    events, num_tokens = await cut_short(gateway, "/v1/responses", input="x", max_output_tokens=800)
    assert events[-1]["type"] == "response.failed"
    [item] = events[-1]["response"]["output"]
    [part] = item["content"]
    assert len(part["text"]) == num_tokens
