"""A conversation keeps within the context."""

import pytest

from penstock.clients.conversation import Conversation, TooLong


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


def test_a_message_that_is_too_long_alone_changes_nothing():
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
