"""Conversations with the demo model: a turn that goes on from another is the turn with the whole context."""

import pytest

from penstock.clients import Client
from penstock.clients.chat_messages import ChatMessage
from penstock.service.app.embedded import local_service

QUESTIONS = ["What does a kernel do?", "How does it know?", "And then?"]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client():
    flags = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": "64M", "threads": 1}
    with local_service("demo", **flags) as target, Client(target) as client:
        yield client


def test_a_turn_that_goes_on_is_the_turn_with_the_whole_context_token_for_token(client):
    messages: list[ChatMessage] = []
    last = ""
    for question in QUESTIONS:
        new: ChatMessage = {"role": "user", "content": question}
        turn = client.complete([new], continue_from=last or None, **GREEDY)
        whole = client.complete([*messages, new], **GREEDY)
        assert turn.token_ids == whole.token_ids
        assert turn.usage.prompt_tokens == whole.usage.prompt_tokens
        assert turn.finished.may_continue
        messages += [new, {"role": "assistant", "content": turn.text}]
        last = turn.request_id


def test_an_output_in_two_halves_is_the_output_whole(client):
    first = client.complete("The kernel is", **GREEDY)
    rest = client.complete("", continue_from=first.request_id, **GREEDY)
    whole = client.complete("The kernel is", **{**GREEDY, "max_tokens": 48})
    assert first.token_ids + rest.token_ids == whole.token_ids
