"""A conversation keeps within the context."""

import pytest

from penstock.clients.conversation import Conversation, TooLong
from penstock.clients.events import Finished, FinishReason, Timings, Usage


def words(messages):
    """A message costs a token, and one for each word."""
    return sum(1 + len(message["content"].split()) for message in messages)


def test_turns_are_remembered_in_order_after_the_system_message():
    conversation = Conversation(100, words)
    conversation.system = "be brief"
    assert conversation.ask("one", 10) == 0
    conversation.answer("two")
    conversation.ask("three", 10)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "user"]
    assert conversation.num_turns == 2


def test_the_oldest_turns_make_room_and_the_system_message_stays():
    conversation = Conversation(20, words)
    conversation.system = "be brief"  # 3
    for i in range(3):
        conversation.ask(f"question {i}", 4)  # 3
        conversation.answer("yes")  # 2
    assert conversation.ask("and now", 6) == 2
    contents = [message["content"] for message in conversation.messages]
    assert contents == ["be brief", "question 2", "yes", "and now"]
    assert words(conversation.messages) + 6 <= 20


def test_a_message_too_long_by_itself_changes_nothing():
    conversation = Conversation(10, words)
    conversation.ask("hello", 4)
    conversation.answer("hi")
    before = conversation.messages
    with pytest.raises(
        TooLong, match="a prompt of 9 tokens; the model's context of 10 leaves no room for an answer of 4"
    ):
        conversation.ask("a b c d e f g h", 4)
    assert conversation.messages == before


def test_a_question_without_an_answer_is_taken_back():
    conversation = Conversation(10, words)
    conversation.ask("hello", 4)
    conversation.answer("")
    assert conversation.messages == []


def test_reset_keeps_the_system_message():
    conversation = Conversation(10, words)
    conversation.system = "x"
    conversation.ask("hello", 4)
    conversation.reset()
    assert [message["role"] for message in conversation.messages] == ["system"]


def finished(request_id, num_tokens, may_continue=True):
    usage = Usage(prompt_tokens=num_tokens - 1, output_tokens=1)
    return Finished(FinishReason.STOP, usage, Timings(), request_id, may_continue=may_continue)


@pytest.fixture
def begun():
    """One turn, whose context of 5 tokens is kept, of 60."""
    conversation = Conversation(60, words)
    conversation.ask("hello you", 4)
    conversation.answer("hi", finished("R1", 5))
    return conversation


def test_what_the_service_kept_is_not_sent_again(begun):
    begun.ask("more", 4)
    assert (begun.continue_from, begun.unsent) == ("R1", [{"role": "user", "content": "more"}])
    assert len(begun.messages) == 3
    begun.answer("ok", finished("R2", 9))
    assert begun.continue_from == "R2"


def test_a_question_without_an_answer_leaves_what_is_kept(begun):
    begun.ask("more", 4)
    begun.answer("")
    assert begun.continue_from == "R1"


@pytest.mark.parametrize("end", [None, finished("R2", 9, may_continue=False)])
def test_an_answer_whose_context_is_not_kept_has_all_sent_next_time(begun, end):
    begun.ask("more", 4)
    begun.answer("ok", end)
    begun.ask("again", 4)
    assert begun.continue_from == ""
    assert begun.unsent == begun.messages


def test_a_reset_or_another_system_message_begins_anew(begun):
    begun.system = "be brief"
    assert begun.continue_from == ""
    begun.answer("x", finished("R2", 9))
    begun.reset()
    assert begun.continue_from == ""


def test_a_context_that_would_grow_too_long_is_sent_anew_and_shorter(begun):
    begun.ask("more", 4)
    begun.answer("ok", finished("R2", 50))  # the service counts more than we do
    assert begun.ask("again", 4) == 0
    assert begun.unsent == begun.messages


def test_a_message_that_is_too_long_changes_nothing_that_is_kept(begun):
    with pytest.raises(TooLong):
        begun.ask("x " * 60, 4)
    assert (begun.continue_from, len(begun.messages)) == ("R1", 2)


def test_all_can_be_sent_after_all(begun):
    begun.ask("more", 4)
    assert begun.send_all(4) == 0
    assert (begun.continue_from, len(begun.unsent)) == ("", 3)
