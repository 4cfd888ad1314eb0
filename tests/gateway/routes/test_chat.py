"""/v1/chat/completions: what each field does, and that a streamed answer put together is the one that comes whole."""

import itertools
import json
from typing import Any

import openai
import pytest

from penstock.clients.gateway.schemas.chat import ChatChunk, ChatCompletion

PATH = "/v1/chat/completions"
TURN_ENDS = 256
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "a <b>", "n": 3}}\n</tool_call>'
FORMS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"stop": ["wor"]},
    {"stop": "wor", "include_stop_str_in_output": True},
    {"return_token_ids": True},
    {"max_completion_tokens": 3},
    {"skip_special_tokens": False},
    {"tools": [TOOL]},
    {"tools": [TOOL], "logprobs": True, "return_token_ids": True},
    {"tools": [TOOL], "parallel_tool_calls": False, "n": 2},
    {"include_reasoning": False},
    {"return_tokens_as_token_ids": True, "logprobs": True},
]
SAID = ["hello world", f"<think>so</think>Yes {CALL}{CALL}", CALL + " <tool_call>{"]


def messages(said):
    """A question that is answered by what it says."""
    return [{"role": "user", "content": f"SAY {said}"}]


async def whole_of(gateway, said, **body):
    response = await gateway.post(PATH, messages=messages(said), **body)
    assert response.status_code == 200, response.text
    return response.json()


def put_together(chunks):
    """As a client does it: text and lists grow."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        ChatChunk.model_validate(chunk, extra="forbid")
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"content": "", "reasoning": "", "calls": {}, "logprobs": None, "ids": []}
            )
            delta = part["delta"]
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning_content", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                known = choice["calls"].setdefault(call["index"], {"name": "", "arguments": "", "id": call.get("id")})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"]["arguments"]
            if part["logprobs"] is not None:
                choice["logprobs"] = (choice["logprobs"] or []) + part["logprobs"]["content"]
            choice["ids"] += part.get("token_ids") or []
            assert choice.get("end") is None, "nothing follows the end"
            choice["end"] = part["finish_reason"]
    return choices


@pytest.fixture
async def scripted_gateway(start_gateway, say):
    """Its model says what it is told to."""
    return await start_gateway(next_token=say, service={"tool_call_parser": "hermes", "reasoning_parser": "think"})


async def test_the_deltas_are_the_whole_answer(scripted_gateway, subtests):
    for fields, said in itertools.product(FORMS, SAID):
        with subtests.test(str(fields), said=said):
            await compare(scripted_gateway, fields, said)


async def compare(scripted_gateway, fields, said):
    whole = await whole_of(scripted_gateway, said, **fields)
    ChatCompletion.model_validate(whole, extra="forbid")
    chunks = await scripted_gateway.chunks(
        PATH, messages=messages(said), stream_options={"include_usage": True}, **fields
    )
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    of_reasoning = [usage["completion_tokens_details"] for usage in (chunks[-1]["usage"], whole["usage"])]
    shown = sum(len(choice["message"].get("reasoning", "")) for choice in whole["choices"])  # a token is a byte
    assert of_reasoning[0] == of_reasoning[1]
    assert of_reasoning[0]["reasoning_tokens"] == shown or fields.get("include_reasoning") is False
    streamed = put_together(chunks)
    assert len(whole["choices"]) == len(streamed) == fields.get("n", 1)
    for choice in whole["choices"]:
        other, message = streamed[choice["index"]], choice["message"]
        assert (message["content"] or "") == other["content"]
        assert message.get("reasoning_content", "") == message.get("reasoning", "") == other["reasoning"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert calls == [{"name": c["name"], "arguments": c["arguments"]} for c in other["calls"].values()]
        assert (choice["logprobs"] or {}).get("content") == other["logprobs"]
        assert choice.get("token_ids", []) == other["ids"]
        assert choice["finish_reason"] == other["end"]


async def test_a_plain_chat(scripted_gateway):
    answer = await whole_of(scripted_gateway, "hi there")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == len("hi there") + 1


async def test_a_call_of_a_tool(scripted_gateway):
    choice = (await whole_of(scripted_gateway, CALL, tools=[TOOL]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"what": "a <b>", "n": 3}
    assert call["id"]


async def test_without_tools_a_call_is_text(scripted_gateway):
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = (await whole_of(scripted_gateway, CALL, **fields))["choices"][0]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"


async def test_calls_and_their_answers_are_shown_to_the_model(scripted_gateway):
    history = [
        {"role": "user", "content": "find it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "SAY done"}]},
    ]
    response = await scripted_gateway.post(PATH, messages=history, tools=[TOOL])
    assert response.json()["choices"][0]["message"]["content"] == "done"
    assert response.json()["usage"]["prompt_tokens"] > len("find it")


async def test_a_refusal_of_the_assistants_is_read_as_its_text(scripted_gateway):
    for parts in ([{"type": "refusal", "refusal": "No."}], [{"type": "text", "text": "No."}]):
        history = [*messages("a"), {"role": "assistant", "content": parts}, *messages("yes")]
        answer = (await scripted_gateway.post(PATH, messages=history, return_token_ids=True)).json()
        prompt = bytes(token for token in answer["prompt_token_ids"] if token < TURN_ENDS)
        assert b"No." in prompt
    both = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    history = [*messages("a"), {"role": "assistant", "content": both}, *messages("yes")]
    answer = (await scripted_gateway.post(PATH, messages=history, return_token_ids=True)).json()
    assert b"Well.\nNo." in bytes(token for token in answer["prompt_token_ids"] if token < TURN_ENDS)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_is_cut_to_what_the_context_leaves(gateway, name):
    body = {"messages": messages("x"), name: 10**6}
    answer = (await gateway.post(PATH, **body)).json()
    assert answer["usage"]["total_tokens"] == 4096
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
async def test_a_limit_below_one_is_refused_with_the_least_valid_one(gateway, name, value):
    error = (await gateway.post(PATH, messages=messages("x"), **{name: value})).json()["error"]
    assert (error["param"], error["message"]) == (name, f"{name}: Input should be greater than or equal to 1")


async def test_tokens_of_reasoning_are_counted_whether_it_is_shown_or_not(scripted_gateway):
    for shows in (True, False, None):
        answer = await whole_of(scripted_gateway, "<think>because</think>So.", include_reasoning=shows, n=2)
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * len("because")}


async def test_a_predicted_output_is_passed_on_and_counted(scripted_gateway):
    submit = scripted_gateway.executor.submit
    predicted: list[bytes] = []

    def submit_and_note(plan):
        predicted.extend(bytes(added.prediction) for added in plan.added)
        submit(plan)

    scripted_gateway.executor.submit = submit_and_note
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    plain = await whole_of(scripted_gateway, "hello world", prediction=None)
    for content, n in (("hello", 1), (parts, 2)):
        prediction = {"type": "content", "content": content}
        answer = await whole_of(scripted_gateway, "hello world", prediction=prediction, n=n)
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        assert details["rejected_prediction_tokens"] > 0  # the fake worker randomizes how many are right
        ChatCompletion.model_validate(answer, extra="forbid")
    assert predicted == [b"", b"hello", b"hello\nyou", b"hello\nyou"]
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ("a", "prediction"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]"),
        ({"type": "content", "content": "x" * ((4 << 20) + 1)}, "prediction.content"),
    ],
)
async def test_what_is_wrong_with_a_prediction_is_named(gateway, prediction, param):
    response = await gateway.post(PATH, messages=messages("x"), prediction=prediction)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param or error["param"].startswith(f"{param}.")


async def test_reasoning_is_apart_and_can_be_left_out(scripted_gateway):
    said = "<think>because</think>So."
    message = (await whole_of(scripted_gateway, said))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("because", "So.")
    message = (await whole_of(scripted_gateway, said, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "So."


async def test_logprobs_are_of_all_tokens(scripted_gateway):
    choice = (await whole_of(scripted_gateway, "hé", logprobs=True, top_logprobs=1))["choices"][0]
    entries = choice["logprobs"]["content"]
    *said, end = entries
    assert [entry["token"] for entry in said] == ["h", "\ufffd", "\ufffd"]
    assert [entry["bytes"] for entry in said] == [[104], [0xC3], [0xA9]]
    assert end["token"].startswith("<")
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


async def test_log_probabilities_and_tokens_of_the_prompt(scripted_gateway):
    answer = await whole_of(scripted_gateway, "x", prompt_logprobs=0, return_token_ids=True)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    assert answer["prompt_logprobs"][0] is None
    for token_id, entry in zip(answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:], strict=True):
        assert str(token_id) in entry


async def test_the_developer_speaks_as_the_system(scripted_gateway):
    said = {"role": "developer", "content": "SAY yes"}
    response = await scripted_gateway.post(PATH, messages=[said], return_token_ids=True)
    prompt = bytes(token for token in response.json()["prompt_token_ids"] if token < TURN_ENDS)
    assert prompt.startswith(b"system")


async def test_a_part_that_is_no_text_is_refused_whatever_else_it_has(scripted_gateway):
    for kind in ("image_url", "input_audio", "file"):
        part = {"type": kind, "text": "SAY x"}
        response = await scripted_gateway.post(PATH, messages=[{"role": "user", "content": [part]}])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[0]"


async def test_what_is_wrong_with_a_chat_whose_tokens_are_shown_is_named(scripted_gateway):
    variables = {"extra": "x" * 70_000}
    response = await scripted_gateway.post(
        PATH, messages=messages("x"), return_token_ids=True, chat_template_kwargs=variables
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Once", "Once"),
        ([{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}], "Once\nupon"),
    ],
)
async def test_the_last_message_may_be_continued(start_gateway, content, text):
    gateway = await start_gateway()
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    body = {"messages": history, "max_tokens": 3, "continue_final_message": True, "add_generation_prompt": False}
    plain = (await gateway.post(PATH, **body)).json()["choices"][0]["message"]["content"]
    echoed = (await gateway.post(PATH, **body, echo=True)).json()["choices"][0]["message"]["content"]
    assert len(plain) == 3
    assert echoed == f"{text}{plain}"


async def test_the_official_client_reads_both_forms(scripted_gateway):
    async with openai.AsyncOpenAI(base_url=scripted_gateway.base, api_key="none") as client:
        whole = await client.chat.completions.create(model="bytes", messages=messages("hello"))
        assert whole.choices[0].message.content == "hello"
        assert whole._request_id is not None
        assert whole.id.endswith(whole._request_id)
        stream = await client.chat.completions.create(model="bytes", messages=messages("hello"), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello"
