"""A conversation that stays within the model's context. Independent of the terminal."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.clients.chat_messages import ChatMessage
from penstock.clients.errors import PenstockError
from penstock.clients.events import Finished

_BETWEEN_TURNS = 16
"""An upper bound of the tokens that a chat template puts between an answer and the next message."""


class TooLong(PenstockError):
    """The last message leaves no room for an answer, even without earlier turns."""


class _Kept(NamedTuple):
    """The part of the conversation that the service keeps: everything up to the last answer."""

    request_id: str
    num_tokens: int
    """An upper bound."""


class Conversation:
    """The messages so far: a system message that stays, then turns of the user and the assistant.

    If the service kept the context of the last answer, only the new message is sent.
    """

    def __init__(self, max_tokens: int, count_tokens: Callable[[Sequence[ChatMessage]], int]) -> None:
        """``count_tokens`` counts the tokens in the prompt of a conversation."""
        self._context = max_tokens
        self._count_tokens = count_tokens
        self._turns: list[ChatMessage] = []
        self._system = ""
        self._kept: _Kept | None = None

    @property
    def system(self) -> str:
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        self._system = text
        self._kept = None

    @property
    def messages(self) -> list[ChatMessage]:
        return self._first + self._turns

    @property
    def _first(self) -> list[ChatMessage]:
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def continue_from(self) -> str:
        """The request whose context the service keeps; empty if all messages must be sent."""
        return "" if self._kept is None else self._kept.request_id

    @property
    def unsent(self) -> list[ChatMessage]:
        """The messages to send: all, or only the user's last one."""
        return self.messages if self._kept is None else self._turns[-1:]

    @property
    def num_turns(self) -> int:
        """The number of messages from the user."""
        return _num_questions(self._turns)

    def ask(self, text: str, room: int) -> int:
        """Adds the user's message and drops the oldest turns until ``room`` tokens are left for the answer; returns how
        many. Raises TooLong, and changes nothing, if this message leaves no room even without earlier turns."""
        question: ChatMessage = {"role": "user", "content": text}
        self._turns.append(question)
        try:
            if self._kept is not None:
                used = self._kept.num_tokens + _BETWEEN_TURNS + self._count_tokens([question])
                if used + room <= self._context:
                    return 0
            return self.send_all(room)
        except BaseException:
            self.take_back()
            raise

    def send_all(self, room: int) -> int:
        """Makes the next request send all messages, and drops the oldest turns as ``ask`` does; returns how many.
        Raises TooLong, and then changes nothing."""
        turns = list(self._turns)
        dropped = 0
        while (used := self._count_tokens(self._first + turns)) + room > self._context:
            if _num_questions(turns) == 1:
                raise TooLong(
                    f"this message makes a prompt of {used:,} tokens; the model's context of {self._context:,} "
                    f"leaves no room for an answer of {room:,}"
                )
            turns.pop(0)
            while turns[0]["role"] != "user":
                turns.pop(0)
            dropped += 1
        self._turns = turns
        self._kept = None
        return dropped

    def answer(self, text: str, finished: Finished | None = None) -> None:
        """Adds the assistant's answer, and the end of its request if known. An answer without text removes the
        question."""
        if not text:
            self.take_back()
            return
        self._turns.append({"role": "assistant", "content": text})
        self._kept = None
        if finished is not None and finished.may_continue:
            usage = finished.usage
            self._kept = _Kept(finished.request_id, usage.prompt_tokens + usage.output_tokens)

    def take_back(self) -> None:
        """Removes the user's last message, if it has no answer."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def reset(self) -> None:
        """Drops all turns; the system message stays."""
        self._turns.clear()
        self._kept = None


def _num_questions(turns: Sequence[ChatMessage]) -> int:
    return sum(message["role"] == "user" for message in turns)
