"""Text is formatted from a template, which yields the same bytes as the chunks of the general path."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from penstock.clients.events import Accepted, ChoiceEnd, Delta, Finished, FinishReason, Timings, Usage
from penstock.clients.gateway.requests.prompts import ParsedPrompt
from penstock.clients.gateway.responses.chat_stream import ChatReader
from penstock.clients.gateway.responses.http_response import TextTemplate, as_event
from penstock.clients.gateway.routes.chat import ChatWriter
from penstock.clients.gateway.routes.completions import CompletionWriter
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.completions import CompletionRequest
from penstock.clients.output import Logprobs, ToolCallPart

NAME = 'a "model"'
CALLER: Any = SimpleNamespace(model_name=NAME, model=SimpleNamespace(name=NAME, version="7", eos_token_ids=[1]))
HARD = st.sampled_from(
    ["", '"', "\\", "\n", "\0", "\x7f", "\x85", "\u2028", "\u2029", "é", "😀", "\ufffd", "</script>"]
)
TEXTS = st.one_of(HARD, st.text(), st.lists(HARD).map("".join))


def logprobs_of(text):
    return Logprobs([-0.5], 0, text_lengths=[len(text)], chosen_texts=[text.encode()])


@st.composite
def deltas(draw):
    """Most have only text."""
    delta = Delta(draw(TEXTS), [draw(st.integers(2, 9))], choice=draw(st.integers(0, 1)))
    match draw(st.integers(0, 9)):
        case 0:
            delta.logprobs = logprobs_of(delta.text)
        case 1:
            delta.reasoning = draw(TEXTS)
        case 2:
            delta.tool_calls = [ToolCallPart(0, "call-1", "f", draw(TEXTS))]
        case 3:
            delta.end = ChoiceEnd(FinishReason.STOP, stop_token_id=1)
    return delta


def chat_writer(**fields):
    messages = [{"role": "user", "content": "x"}]
    body = ChatRequest.model_validate({"model": "m", "messages": messages, "n": 2, "stream": True, **fields})
    return ChatWriter(body, CALLER, ChatReader(body, CALLER), [5] if body.return_token_ids else None)


def completion_writer(**fields):
    body = CompletionRequest(model="m", prompt="x", n=2, stream=True, **fields)
    return CompletionWriter(body, [ParsedPrompt(text="x", token_ids=[5])], CALLER)


async def answer_of(writer, events, *, with_templates):
    """Returns the whole answer and how many of its events came from a template."""
    sent = [as_event(chunk) for chunk in writer.begin_response("id")]
    num_templates = 0
    for event in events:
        data = writer.text_event(0, event) if with_templates else None
        num_templates += data is not None
        if data is None:
            data = b"".join(map(as_event, await writer.add_arrivals([(0, event)])))
        sent.append(data)
    return sent + [as_event(chunk) for chunk in writer.end()], num_templates


@pytest.mark.parametrize("make_writer", [chat_writer, completion_writer])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    outputs=st.lists(deltas(), max_size=12),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "stream_options": st.sampled_from([{"include_usage": True}, {"continuous_usage_stats": True}]),
            "return_token_ids": st.booleans(),
            "echo": st.booleans(),
        },
    ),
)
def test_templates_change_nothing(make_writer, outputs, fields):
    events = [Accepted("id", 3, 0, 0), *outputs, Finished(FinishReason.STOP, Usage(3, 0, len(outputs)), Timings())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 1e9)
        writers = [make_writer(**fields) for _ in range(2)]
    plain, _ = asyncio.run(answer_of(writers[0], events, with_templates=False))
    quick, _ = asyncio.run(answer_of(writers[1], events, with_templates=True))
    assert quick == plain


@pytest.mark.parametrize("make_writer", [chat_writer, completion_writer])
async def test_plain_text_is_formatted_from_a_template(make_writer):
    events = [Accepted("id", 3, 0, 0), Delta("a", [2]), Delta("b", [3]), Delta("c", [4], logprobs=logprobs_of("c"))]
    assert (await answer_of(make_writer(), events, with_templates=True))[1] == 2
    with_usage = make_writer(stream_options={"continuous_usage_stats": True, "include_usage": True})
    assert (await answer_of(with_usage, events, with_templates=True))[1] == 0


@given(TEXTS, TEXTS)
def test_a_template_has_its_text_anywhere_before_constants(name, text):
    def chunk(shown):
        return {"model": name, "choices": [{"text": shown, "logprobs": None}], "usage": None}

    assert TextTemplate(chunk).event(text) == as_event(chunk(text))
