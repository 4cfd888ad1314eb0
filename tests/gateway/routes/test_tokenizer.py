"""/tokenize and /detokenize, as vLLM has them; id i is byte i, 256 ends a turn and 257 begins one."""

import httpx
import pytest

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def post(scripted):
    def post(path, **body):
        return httpx.post(scripted + path, json=body, timeout=120)

    return post


def test_a_text_becomes_tokens(post):
    answer = post("/tokenize", prompt="hé").json()
    assert answer["tokens"] == list("hé".encode())
    assert answer["count"] == 3
    assert answer["max_model_len"] > 0
    assert answer["token_strs"] is None
    assert post("/tokenize", prompt="hé", model="gpt-4o", add_special_tokens=False).json() == answer


def test_each_token_comes_with_its_text(post):
    assert post("/tokenize", prompt="hé", return_token_strs=True).json()["token_strs"] == ["h", "\ufffd", "\ufffd"]


def test_a_conversation_becomes_the_tokens_of_its_prompt(post):
    answer = post("/tokenize", messages=HI).json()
    assert answer["tokens"] == [257, *b"user\nhi", 256, 257, *b"assistant\n"]
    assert post("/tokenize", messages=HI, add_generation_prompt=False).json()["count"] == answer["count"] - 11
    open_end = [*HI, {"role": "assistant", "content": "yes"}]
    going_on = post("/tokenize", messages=open_end, continue_final_message=True, add_generation_prompt=False).json()
    assert going_on["tokens"] == [*answer["tokens"], *b"yes"]


def test_tools_are_in_the_prompt(post):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    tokens = post("/tokenize", messages=HI, tools=[tool]).json()["tokens"]
    assert b'"look"' in bytes(token for token in tokens if token < 256)


def test_what_the_prompt_has_is_what_a_request_pays_for(post):
    count = post("/tokenize", messages=HI).json()["count"]
    answer = post("/v1/chat/completions", messages=HI, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == count


def test_tokens_become_text_special_ones_included(post):
    answer = post("/detokenize", tokens=[257, *"hé".encode(), 256])
    assert answer.json() == {"prompt": "<|turn|>hé<|end|>"}
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param", "why"),
    [
        ("/tokenize", {}, None, "send one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, None, "send one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "only with messages"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "the chat template adds"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template", "not supported"),
        ("/tokenize", {"prompt": "a", "pormpt": "b"}, "pormpt", "did you mean prompt"),
        ("/detokenize", {"tokens": [300]}, "tokens[0]", "258"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ("/detokenize", {}, "tokens", "required"),
    ],
)
def test_what_is_wrong_is_named(post, path, body, param, why):
    answer = post(path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert why in error["message"]


def test_another_model_is_not_found(post):
    assert post("/tokenize", prompt="a", model="other").status_code == 404
    assert post("/detokenize", tokens=[1], model="other").status_code == 404
