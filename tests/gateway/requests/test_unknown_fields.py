"""``--unknown-fields ignore``: what is ignored, logged and counted."""

import logging

import pytest

from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.responses import ResponsesRequest
from penstock.clients.gateway.schemas.unknown_fields import without_unknown_fields

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def prune(body, model=ChatRequest):
    return without_unknown_fields(body, model, model.other_fields())


def test_fields_are_removed_at_any_depth_and_named_by_their_paths():
    schema = {"type": "object", "foo": 1}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": 1}], "foo": 1}] * 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "foo": 1}, "foo": 1}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema, "foo": 1}, "foo": 1},
        "stream_options": {"include_usage": True, "foo": 1},
        "structured_outputs": {"json": schema, "foo": 1},
        "chat_template_kwargs": {"foo": 1},
        "user": "me",
        "use_beam_search": True,
        "foo": {"bar": 1},
    }
    kept, names = prune(body)
    assert sorted(set(names)) == [
        "foo",
        "messages[].content[].foo",
        "messages[].foo",
        "response_format.foo",
        "response_format.json_schema.foo",
        "stream_options.foo",
        "structured_outputs.foo",
    ]
    assert kept["messages"] == [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 2
    assert kept["tools"] == body["tools"]  # a template may show what it likes of a tool
    assert kept["response_format"] == {"type": "json_schema", "json_schema": {"schema": schema}}
    assert kept["structured_outputs"] == {"json": schema}
    assert kept["chat_template_kwargs"] == {"foo": 1}
    assert kept["user"] == "me"
    assert kept["use_beam_search"] is True
    assert "foo" not in kept


def test_fields_that_a_request_is_refused_for_stay():
    kept, names = prune({"input": "a", "previous_response_id": "x", "text": {"foo": 1}}, ResponsesRequest)
    assert kept == {"input": "a", "previous_response_id": "x", "text": {}}
    assert names == ["text.foo"]


@pytest.mark.parametrize("body", [[1], "a", None, {"messages": 5}, {"messages": [5, None]}, {"tools": {"a": 1}}])
def test_what_is_no_object_is_left_to_the_schema(body):
    assert prune(body)[0] == ({"tools": {"a": 1}} if body == {"tools": {"a": 1}} else body)


async def test_ignored_fields_are_logged_by_name_and_counted(start_gateway, caplog):
    gateway = await start_gateway(ignores_unknown_fields=True)
    fields = {"max_tokens": 1, "temprature": "CANARY", "stream_options": {"foo": "CANARY"}, "stream": True}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            response = await gateway.post(CHAT, messages=HELLO, **fields)
            assert response.status_code == 200, response.text
        assert (await gateway.post(COMPLETIONS, prompt="a", max_tokens=1, **{"x\ny": 1})).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "unknown fields" in record.getMessage()]
    assert len(lines) == 1  # a minute has one
    assert "temprature, stream_options.foo" in lines[0]
    assert "CANARY" not in caplog.text
    count = gateway.app.state.gateway_metrics.registry.get_sample_value
    assert count("penstock_gateway_unknown_fields_total", {"route": CHAT}) == 6
    assert count("penstock_gateway_unknown_fields_total", {"route": COMPLETIONS}) == 1


async def test_what_cannot_be_done_is_refused_all_the_same(start_gateway):
    gateway = await start_gateway(ignores_unknown_fields=True)
    for field in ("use_beam_search", "audio"):
        response = await gateway.post(CHAT, messages=HELLO, **{field: True})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


async def test_by_default_unknown_fields_are_refused(gateway):
    for fields, param in (({"foo": 1}, "foo"), ({"stream_options": {"foo": 1}, "stream": True}, "stream_options.foo")):
        response = await gateway.post(CHAT, messages=HELLO, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
