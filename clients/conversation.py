"""A conversation that stays within the model's context. Knows no terminal."""

from collections.abc import Callable, Sequence

from penstock.clients.errors import PenstockError
from penstock.clients.requests import ChatMessage

CountTokens = Callable[[Sequence[ChatMessage]], int]
"""How many tokens the prompt of a conversation has."""


class TooLong(PenstockError):
    """The last message alone leaves no room for an answer."""


class Conversation:
    """The messages so far: a system message that stays, then turns of the user and the assistant."""

    def __init__(self, max_tokens: int, count_tokens: CountTokens) -> None:
        self._context = max_tokens
        self._count_tokens = count_tokens
        self._turns: list[ChatMessage] = []
        self.system = ""

    @property
    def messages(self) -> list[ChatMessage]:
        """What the service is to see."""
        first: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return first + self._turns

    @property
    def num_turns(self) -> int:
        """How many messages of the user there are."""
        return sum(message["role"] == "user" for message in self._turns)

    def ask(self, text: str, room: int) -> int:
        """Adds the user's message and drops the oldest turns until ``room`` tokens are left for the answer; returns how
        many. Raises TooLong, and keeps all as it was, if even this message alone leaves no room."""
        before = list(self._turns)
        self._turns.append({"role": "user", "content": text})
        dropped = 0
        try:
            while (used := self._count_tokens(self.messages)) + room > self._context:
                if self.num_turns == 1:
                    raise TooLong(
                        f"this message makes a prompt of {used:,} tokens; the model's context of {self._context:,} "
                        f"leaves no room for an answer of {room:,}"
                    )
                self._drop_oldest_turn()
                dropped += 1
        except BaseException:
            self._turns = before
            raise
        return dropped

    def answer(self, text: str) -> None:
        """Adds the assistant's answer; an answer without text takes back the question."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """Removes the user's last message, if it has no answer."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self._turns.clear()

    def _drop_oldest_turn(self) -> None:
        self._turns.pop(0)
        while self._turns[0]["role"] != "user":
            self._turns.pop(0)
