"""The conformance list, by the official ``openai`` package, against a service on the demo model: each case whole and
streamed, and the two are one answer."""

import array
import base64
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.completions import CompletionRequest
from penstock.clients.gateway.schemas.embeddings import EmbeddingsRequest
from penstock.clients.gateway.schemas.responses import ResponsesRequest
from penstock.clients.gateway.schemas.unsupported import IGNORED, UNSUPPORTED

from .conformance import BASE, CASES, WORD, Answer, Choice, Support
from .conformance.table import table

KNOWN = {
    "chat": chat_create_params.CompletionCreateParamsBase.__annotations__,
    "completions": completion_create_params.CompletionCreateParamsBase.__annotations__,
    "responses": response_create_params.ResponseCreateParamsBase.__annotations__,
    "embeddings": embedding_create_params.EmbeddingCreateParams.__annotations__,
}
"""The package's own parameters; others travel in its ``extra_body``."""
RUNS = [pytest.param(case, endpoint, id=f"{endpoint}-{case.name}") for case in CASES for endpoint in case.endpoints]


@pytest.fixture(scope="module")
def clients(demo, scripted):
    """Of the services that cases name."""
    with (
        openai.OpenAI(base_url=demo.openai, api_key="none", max_retries=0, timeout=120) as of_demo,
        openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0, timeout=120) as of_scripted,
    ):
        yield {"demo": of_demo, "scripted": of_scripted}


MODELS = {"demo": "demo", "scripted": "gpt-4o"}


def request_of(endpoint, case, *changes):
    """The arguments of the package's method. A field of None is left out."""
    body: dict[str, Any] = {"model": MODELS[case.service], **BASE[endpoint]}
    for change in (case.body, *changes):
        body |= change
    given = {name: value for name, value in body.items() if value is not None}
    if endpoint == "responses" and "max_tokens" in given:
        given["max_output_tokens"] = given.pop("max_tokens")
    extra = {name: given.pop(name) for name in list(given) if name not in KNOWN[endpoint] and name != "stream"}
    return given | {"extra_body": extra}


def method_of(client, endpoint):
    of = client.chat.completions if endpoint == "chat" else getattr(client, endpoint)
    return of.create


def asked(client, endpoint, case, **changes):
    """The whole answer."""
    whole = method_of(client, endpoint)(**request_of(endpoint, case, case.whole | changes))
    match endpoint:
        case "responses":
            return response_of(whole, [(item, *of_item(item)) for item in whole.output])
        case "embeddings":
            return vectors_of(whole)
    return answer_of([whole])


def streamed(client, endpoint, case):
    """The same, put together from its parts."""
    if endpoint == "responses":
        return response_of_events(list(method_of(client, endpoint)(**request_of(endpoint, case, {"stream": True}))))
    options = {"stream": True, "stream_options": {"include_usage": True, **case.body.get("stream_options", {})}}
    parts = list(method_of(client, endpoint)(**request_of(endpoint, case, options)))
    check_order(parts, endpoint)
    return answer_of(parts)


def check_order(parts, endpoint):
    """What a client counts on."""
    *others, last = parts
    assert last.usage is not None
    assert last.choices == []
    assert len({part.id for part in parts}) == 1
    seen, ended = set(), set()
    for part in others:
        for choice in part.choices:
            assert choice.index not in ended
            if endpoint == "chat":
                assert (choice.delta.role == "assistant") == (choice.index not in seen)
            seen.add(choice.index)
            if choice.finish_reason is not None:
                ended.add(choice.index)
    assert seen == ended


def answer_of(parts):
    """An answer from its parts, or from the whole as its only one."""
    answer = Answer(model=parts[0].model, request_id=parts[0].id, raw=parts[-1])
    for part in parts:
        assert part.model == answer.model
        if part.usage is not None and not (len(parts) > 1 and part is not parts[-1]):
            answer.prompt_tokens, answer.output_tokens = part.usage.prompt_tokens, part.usage.completion_tokens
            assert part.usage.total_tokens == answer.prompt_tokens + answer.output_tokens
        answer.prompt_token_ids += getattr(part, "prompt_token_ids", None) or []
        answer.prompt_logprobs += getattr(part, "prompt_logprobs", None) or []
        for choice in part.choices:
            answer.prompt_token_ids += getattr(choice, "prompt_token_ids", None) or []
            answer.prompt_logprobs += getattr(choice, "prompt_logprobs", None) or []
            while len(answer.choices) <= choice.index:
                answer.choices.append(Choice())
            add(answer.choices[choice.index], choice)
    return answer


def add(to, part):
    """One part of a choice."""
    message = getattr(part, "delta", None) or getattr(part, "message", None)
    if message is None:
        to.text += part.text
    else:
        to.text += message.content or ""
        to.reasoning += getattr(message, "reasoning_content", None) or ""
        for position, call in enumerate(message.tool_calls or []):
            index = getattr(call, "index", position)
            if index == len(to.calls):
                assert call.id
                assert call.type == "function"
                to.calls.append((call.function.name, ""))
            name, arguments = to.calls[index]
            to.calls[index] = (name, arguments + (call.function.arguments or ""))
    to.token_ids += getattr(part, "token_ids", None) or []
    if part.finish_reason is not None:
        assert to.finish_reason is None
        to.finish_reason, to.stop_reason = part.finish_reason, getattr(part, "stop_reason", None)
    if part.logprobs is not None:
        add_logprobs(to, part.logprobs)


def add_entries(to, entries):
    """Of chats and of Responses."""
    for entry in entries:
        given = entry.model_dump()["bytes"]
        assert entry.token in (bytes(given).decode(errors="replace"), f"token_id:{WORD}")
        to.tokens.append(entry.token)
        to.logprobs.append(entry.logprob)
        to.top.append([(top.token, top.logprob) for top in entry.top_logprobs])


def add_logprobs(to, logprobs):
    """Of chats and of completions."""
    if hasattr(logprobs, "content"):
        add_entries(to, logprobs.content or [])
        return
    to.tokens += logprobs.tokens or []
    to.logprobs += logprobs.token_logprobs or []
    to.top += [list((top or {}).items()) for top in logprobs.top_logprobs or []]
    to.offsets += logprobs.text_offset or []


def of_item(item):
    """Text and log-probabilities of an item of a response."""
    match item.type:
        case "message":
            (part,) = item.content
            return part.text, part.logprobs
        case "reasoning":
            return item.content[0].text, []
    return item.arguments, []


def response_of_events(events):
    """An answer from its deltas; the last event has how it ended."""
    items = {event.output_index: event.item for event in events if event.type == "response.output_item.added"}
    told: dict[int, tuple[str, list[Any]]] = {index: ("", []) for index in items}
    for event in events:
        if event.type.endswith(".delta"):
            text, logprobs = told[event.output_index]
            told[event.output_index] = (text + event.delta, logprobs + list(getattr(event, "logprobs", None) or []))
    return response_of(events[-1].response, [(items[index], *told[index]) for index in items])


def response_of(response, items):
    """An answer from its items, each with its text and log-probabilities, and from what is said of it all."""
    choice = Choice()
    for item, text, logprobs in items:
        match item.type:
            case "message":
                choice.text += text
                add_entries(choice, logprobs)
            case "reasoning":
                choice.reasoning += text
            case _:
                choice.calls.append((item.name, text))
    ended = {"completed": "tool_calls" if choice.calls else "stop", "incomplete": "length"}
    choice.finish_reason = ended[response.status]
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    answer = Answer(response.model, [choice], usage.input_tokens, usage.output_tokens, request_id=response.id)
    answer.tells_stop, answer.raw = False, response
    return answer


def vectors_of(answer):
    """Of embeddings: the package decodes what it asked for itself."""
    vectors = []
    for each in answer.data:
        given = each.embedding
        vectors.append(array.array("f", base64.b64decode(given)).tolist() if isinstance(given, str) else given)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens
    return Answer(answer.model, prompt_tokens=answer.usage.prompt_tokens, vectors=vectors, raw=answer)


@pytest.mark.parametrize(("case", "endpoint"), RUNS)
def test_case(case, endpoint, clients):
    client = clients[case.service]
    if case.support is Support.REFUSED:
        refused(case, endpoint, client)
        return
    whole = asked(client, endpoint, case)
    if case.streams and endpoint != "embeddings":
        assert streamed(client, endpoint, case) == whole
    assert all(choice.finish_reason for choice in whole.choices)
    if case.support is Support.IGNORED:
        assert asked(client, endpoint, case, **dict.fromkeys(case.body)) == whole
    if case.holds is not None:
        case.holds(whole, lambda **changes: asked(client, endpoint, case, **changes))


def refused(case, endpoint, client):
    """Whole or streamed, the field is named."""
    alone = "stream" in case.body or endpoint == "embeddings"
    for options in ({},) if alone else ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as caught:
            method_of(client, endpoint)(**request_of(endpoint, case, options))
        error = caught.value
        assert error.status_code == case.status
        assert error.param is not None
        assert error.param.partition(".")[0].partition("[")[0] == case.field
        assert case.field in error.message
        assert error.type


def test_the_documentation_has_the_list():
    assert table() in (Path(__file__).parents[3] / "docs/http.md").read_text()


SCHEMAS = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "embeddings": EmbeddingsRequest,
}


@pytest.mark.parametrize(("endpoint", "schema"), SCHEMAS.items())
def test_every_field_of_the_gateway_is_in_the_list(endpoint, schema):
    listed = {case.field for case in CASES if endpoint in case.endpoints} | {"stream"}
    assert sorted(schema.model_fields.keys() - listed) == []
    anywhere = {case.field for case in CASES}
    assert sorted((UNSUPPORTED.keys() | IGNORED) - anywhere) == []


def test_every_field_of_the_package_is_in_the_list():
    for endpoint, known in KNOWN.items():
        listed = {case.field for case in CASES if endpoint in case.endpoints}
        assert sorted(known.keys() - listed) == []
