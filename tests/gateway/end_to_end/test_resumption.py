"""Streams that break off and continue at another gateway, in front of another service: at any place, the rest is what
the first stream would have sent, and what cannot continue is refused by name."""

import asyncio
import hashlib
import json
from typing import Any

import openai
import pytest

HEADER = "x-penstock-resume-ticket"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"x": "é", "y": [1, 2]}}\n</tool_call>'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
EVERYTHING: dict[str, Any] = {
    "messages": [{"role": "user", "content": f"SAY <think>so é 😀 then</think>ok é <tool_cal {CALLS}"}],
    "tools": TOOLS,
}
SAMPLED: dict[str, Any] = {"prompt": "The", "max_tokens": 60}
IDS = {"return_token_ids": True}
STOP = {"stop": ["qé", *map(chr, range(1, 12))], "include_stop_str_in_output": True, "min_tokens": 12}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, SAMPLED),
    "text and ids": (COMPLETIONS, SAMPLED | IDS | USAGE),
    "choices": (COMPLETIONS, SAMPLED | STOP | {"n": 3}),
    "log-probabilities": (COMPLETIONS, SAMPLED | STOP | IDS | {"n": 2, "logprobs": 2}),
    "chat": (CHAT, EVERYTHING),
    "chat and ids": (CHAT, EVERYTHING | IDS | USAGE | {"logprobs": True}),
    "without reasoning": (CHAT, EVERYTHING | {"include_reasoning": False}),
}


def told(history, sampling):
    """A byte that depends on the seed and on all before it, or the next one of what a chat says."""
    if 257 in history:
        return say(history)
    return hashlib.sha256(f"{sampling.seed} {len(history)} {history[-30:]}".encode()).digest()[0]


def say(history):
    """The next byte of what the chat wants said, after the prompt that ends with the last turn."""
    last_turn = max(at for at, token in enumerate(history) if token == 257)
    wanted = bytes(token for token in history[:last_turn] if token < 256).rpartition(b"SAY ")[2]
    at = len(history) - last_turn - 1 - len("assistant\n")
    return wanted[at] if at < len(wanted) else 256


class Received:
    """What a caller has of a stream: its chunks, added up."""

    def __init__(self, ticket, n=1):
        self.ticket = ticket
        self.choices: list[dict[str, Any]] = [
            {"text": "", "reasoning": "", "calls": [], "ids": [], "logprobs": [], "end": None} for _ in range(n)
        ]
        self.usage = None

    def add(self, chunk):
        self.usage = chunk.get("usage") or self.usage
        for part in chunk["choices"]:
            choice, delta = self.choices[part["index"]], part.get("delta", {})
            choice["text"] += part.get("text") or delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(choice["calls"]):
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][call["index"]][1] += call["function"]["arguments"]
            choice["ids"] += part.get("token_ids") or []
            choice["logprobs"] += entries(part.get("logprobs") or {})
            if part.get("finish_reason"):
                assert choice["end"] is None
                choice["end"] = part["finish_reason"], part["stop_reason"]

    def add_all(self, chunks):
        for chunk in chunks:
            self.add(chunk)
        return self

    @property
    def resume_from(self):
        return {
            "ticket": self.ticket,
            "choices": [
                {
                    "text_chars": len(choice["text"]),
                    "reasoning_chars": len(choice["reasoning"]),
                    "tool_calls": len(choice["calls"]),
                    "argument_chars": len(choice["calls"][-1][1]) if choice["calls"] else 0,
                    "token_ids": choice["ids"],
                    "has_ended": choice["end"] is not None,
                }
                for choice in self.choices
            ],
        }


def entries(logprobs):
    """The log-probabilities of tokens, in either endpoint's format."""
    if "content" in logprobs:
        return logprobs["content"]
    names = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
    return [list(entry) for entry in zip(*(logprobs.get(name, ()) for name in names), strict=True)]


async def stream(gateway, path, body):
    """A stream's ticket and chunks."""
    response = await gateway.post(path, stream=True, **body)
    assert response.status_code == 200, response.text
    *events, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data:")]
    assert end == "[DONE]"
    return response.headers.get(HEADER), [json.loads(event) for event in events]


async def whole_of(gateway, path, body):
    """All of a stream."""
    ticket, chunks = await stream(gateway, path, body)
    return Received(ticket, body.get("n", 1)).add_all(chunks)


@pytest.fixture
async def gateways(start_gateway):
    """Two gateways, each in front of a service of its own."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    return [await start_gateway(next_token=told, service=parsers, seconds_per_step=0.001) for _ in range(2)]


@pytest.mark.parametrize("case", CASES)
async def test_a_stream_goes_on_at_another_gateway(gateways, case):
    path, body = CASES[case]
    n = body.get("n", 1)
    ticket, chunks = await stream(gateways[0], path, body)
    whole = Received(ticket, n).add_all(chunks)
    assert all(choice["end"] for choice in whole.choices)
    for count in {*range(0, len(chunks), max(1, len(chunks) // 4)), len(chunks)}:
        received = Received(ticket, n).add_all(chunks[:count])
        new_ticket, rest = await stream(gateways[1], path, body | {"resume_from": received.resume_from})
        assert new_ticket == ticket
        assert received.add_all(rest).choices == whole.choices, count
        if whole.usage is not None:
            assert received.usage["completion_tokens"] == whole.usage["completion_tokens"]


async def test_a_broken_stream_of_the_openai_package(gateways):
    """Dropped, not read to its end, and continued twice; there is nothing in it that its caller has."""
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    said = "SAY " + "The quick brown fox, and so on. " * 9
    request: dict[str, Any] = {"model": "bytes", "messages": [{"role": "user", "content": said}], "stream": True}
    text, extra = "", dict[str, Any]()
    for gateway, num_chars in zip((*gateways, gateways[0]), (60, 120, len(said)), strict=True):
        async with openai.AsyncOpenAI(base_url=gateway.base, **options) as client:
            raw = await client.chat.completions.with_raw_response.create(**request, extra_body=extra)
            chunks = raw.parse()
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                if len(text) >= num_chars:
                    break
            await chunks.close()
            choice = {"text_chars": len(text), "has_ended": False}
            extra = {"resume_from": {"ticket": raw.headers[HEADER], "choices": [choice]}}
    assert text == said.removeprefix("SAY ")


LONG = SAMPLED | {"max_tokens": 120, "seed": 5, "n": 2, "stop": [f"{chr(letter)}\u2603" for letter in range(97, 123)]}
"""A letter is held back, as it may begin a stop string."""


SLOW = 0.01
"""The seconds of a step, with which a service can be stopped before the end of a stream."""


async def read_and_stop(http, gateways, body):
    """The ticket and chunks of a stream whose service, that of one of the gateways, is stopped in the middle of it. The
    last chunk of each choice does not count after an error: it may have text that was held back."""
    received, last, num_chunks = None, dict[int, Any](), 0
    async with http.stream("POST", COMPLETIONS, json={"stream": True} | body) as response:
        received = Received(response.headers[HEADER], 2)
        stopping = None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk, num_chunks = json.loads(line.removeprefix("data: ")), num_chunks + 1
            if num_chunks == 10:
                [running] = [each for each in gateways if each.engine.stats().running]
                stopping = asyncio.create_task(running.service.stop())
            for part in chunk.get("choices", ()):
                if part["index"] in last:
                    received.add(last[part["index"]])
                last[part["index"]] = chunk
    assert stopping is not None
    await stopping
    return received, last, chunk


@pytest.mark.parametrize("fields", [{}, IDS])
async def test_a_stream_that_ended_with_an_error(start_gateway, fields):
    first, second = await start_gateway(next_token=told, seconds_per_step=SLOW), await start_gateway(next_token=told)
    whole = await whole_of(second, COMPLETIONS, LONG | fields)
    received, _, error = await read_and_stop(first.http, [first], LONG | fields)
    assert error["error"]["code"]
    _, rest = await stream(second, COMPLETIONS, LONG | fields | {"resume_from": received.resume_from})
    assert received.add_all(rest).choices == whole.choices


@pytest.mark.parametrize("fields", [{}, IDS])
async def test_a_stream_that_goes_on_and_then_moves(start_gateway, http_before, fields):
    """What a caller had before is also what the next service must not send."""
    first, second = [await start_gateway(next_token=told, seconds_per_step=SLOW) for _ in range(2)]
    whole = await whole_of(second, COMPLETIONS, LONG | fields)
    ticket, chunks = await stream(second, COMPLETIONS, LONG | fields)
    had = Received(ticket, 2).add_all(chunks[:20])
    async with http_before(f"{first.target},{second.target}") as (_, http):
        body = LONG | fields | {"resume_from": had.resume_from}
        received, last, end = await read_and_stop(http, (first, second), body)
    assert "error" not in end
    received.add_all(last.values())
    for index, choice in enumerate(whole.choices):
        before, after = had.choices[index], received.choices[index]
        assert before["text"] + after["text"] == choice["text"]
        assert before["ids"] + after["ids"] == choice["ids"]
        assert after["end"] == choice["end"]


async def test_log_probabilities_without_ids_are_sent_again(gateways):
    """With the offsets that they have in the whole text."""
    body = SAMPLED | {"logprobs": 1}
    ticket, chunks = await stream(gateways[0], COMPLETIONS, body)
    whole, received = Received(ticket).add_all(chunks), Received(ticket).add_all(chunks[: len(chunks) // 2])
    received.choices[0]["logprobs"] = []
    _, rest = await stream(gateways[1], COMPLETIONS, body | {"resume_from": received.resume_from})
    assert received.add_all(rest).choices == whole.choices


async def test_only_streams_of_one_prompt_have_a_ticket(gateway):
    ticket, _ = await stream(gateway, COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2})
    assert ticket is None
    whole = await gateway.post(COMPLETIONS, prompt="a", max_tokens=2)
    assert HEADER not in whole.headers
    refused = await gateway.post(COMPLETIONS, prompt=5, stream=True)
    assert HEADER not in refused.headers


NOTHING: dict[str, Any] = {}
TICKET = "{ticket}"
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str | None]] = {
    "no base64": ({}, {"ticket": "é!"}, "resume_from.ticket", "ticket_invalid"),
    "not as many digits as base64 has": ({}, {"ticket": "A" * 5}, "resume_from.ticket", "ticket_invalid"),
    "no ticket": ({}, {"ticket": ""}, "resume_from.ticket", None),
    "too long a ticket": ({}, {"ticket": "A" * 173}, "resume_from.ticket", None),
    "a damaged ticket": ({}, {"ticket": "A" * 8}, "resume_from.ticket", "ticket_invalid"),
    "another prompt": ({"prompt": "That"}, {"ticket": TICKET}, "resume_from.ticket", "ticket_mismatch"),
    "other sampling": ({"top_p": 0.5}, {"ticket": TICKET}, "resume_from.ticket", "ticket_mismatch"),
    "several prompts": ({"prompt": ["a", "b"]}, {"ticket": TICKET}, "resume_from", None),
    "a whole answer": ({"stream": False}, {"ticket": TICKET}, "resume_from", None),
    "an echo": ({"echo": True}, {"ticket": TICKET}, "echo", None),
    "no choices": ({}, {"ticket": TICKET, "choices": []}, "resume_from.choices", None),
    "too few choices": ({"n": 2}, {"ticket": TICKET}, "resume_from.choices", "invalid_field"),
    "too many choices": ({}, {"ticket": TICKET, "choices": [NOTHING] * 65}, "resume_from.choices", None),
    "a negative count": (
        {},
        {"ticket": TICKET, "choices": [{"text_chars": -1}]},
        "resume_from.choices[0].text_chars",
        None,
    ),
    "too large a count": (
        {},
        {"ticket": TICKET, "choices": [{"tool_calls": 2**32}]},
        "resume_from.choices[0].tool_calls",
        None,
    ),
    "unknown tokens": (
        {},
        {"ticket": TICKET, "choices": [{"token_ids": [999]}]},
        "resume_from.choices[0].token_ids",
        "invalid_field",
    ),
    "an unknown count": ({}, {"ticket": TICKET, "choices": [{"chars": 1}]}, "resume_from.choices[0].chars", None),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_refusal_names_the_field(start_gateway, case):
    changes, resume_from, param, code = REFUSALS[case]
    gateway = await start_gateway(next_token=told)
    ticket, _ = await stream(gateway, COMPLETIONS, SAMPLED)
    resume_from = {"choices": [NOTHING], **resume_from}
    if resume_from["ticket"] == TICKET:
        resume_from["ticket"] = ticket
    body = {"stream": True} | SAMPLED | changes | {"resume_from": resume_from}
    refused = await gateway.post(COMPLETIONS, **body)
    error = refused.json()["error"]
    assert refused.status_code == 400, error
    assert error["param"].startswith(param)
    assert error["message"].startswith(param)
    assert code in (None, error["code"])
    assert "accepted.resume_ticket" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "stream": True}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_other_routes_refuse_it_by_name(gateway, path, body):
    refused = await gateway.post(path, **body, resume_from={"ticket": "AAAA", "choices": [NOTHING]})
    assert refused.status_code == 400
    assert "resume_from" in refused.json()["error"]["message"]
