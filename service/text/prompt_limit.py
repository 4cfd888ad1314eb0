"""Limits the tokens of a text, and makes the errors for longer texts. Independent of the tokenizer."""

from dataclasses import dataclass
from typing import NoReturn

from penstock.service.errors import Reason, ServiceError, invalid

MAX_TOKENS_AT_ONCE = 3 << 18
"""The limit of a text that is not a prompt. The tokenizer's library takes about 250 bytes per token while it works."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The limit of one prompt."""

    max_tokens: int
    """Including those of the context."""
    field: str
    """The field of the request that has the prompt."""
    num_context_tokens: int = 0
    """Tokens of the context that the prompt continues."""

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens - self.num_context_tokens

    def check(self, num_tokens: int) -> None:
        """Refuses a prompt that has too many tokens, or none; they do not include the context's. Raises ServiceError
        CONTEXT_LENGTH."""
        if num_tokens > self.max_new_tokens:
            self.refuse(f"{num_tokens + self.num_context_tokens:,}")
        if not num_tokens and not self.num_context_tokens:
            raise invalid(self.field, f"must be 1 to {self.max_tokens:,} tokens; it has 0")

    def check_at_least(self, num_tokens: int) -> None:
        """Refuses a prompt that has at least ``num_tokens`` if those are too many. Raises ServiceError."""
        if num_tokens > self.max_new_tokens:
            self.refuse(f"{num_tokens + self.num_context_tokens:,} at least")

    def refuse(self, what: str = "more") -> NoReturn:
        """Raises the error for a prompt that has too many tokens, ``what`` of them."""
        problem = f"must be 1 to {self.max_tokens:,} tokens; it has {what}"
        if self.num_context_tokens:
            problem = (
                f"at most {self.max_tokens:,} tokens together with the context; they are {what}, "
                f"{self.num_context_tokens:,} of them the context's"
            )
        raise invalid(self.field, problem, Reason.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class TextLimit(PromptLimit):
    """The limit of a text that is not a prompt, or of one that is truncated to a prompt afterwards."""

    max_tokens: int = MAX_TOKENS_AT_ONCE
    field: str = "text"

    def check(self, num_tokens: int) -> None:
        """Refuses a text that has too many tokens. Raises ServiceError TOO_EXPENSIVE."""
        if num_tokens > self.max_tokens:
            self.refuse(f"{num_tokens:,}")

    def refuse(self, what: str = "more") -> NoReturn:
        problem = f"{self.field}: at most {self.max_tokens:,} tokens at once; it has {what}; send less at once"
        raise ServiceError(Reason.TOO_EXPENSIVE, problem, field=self.field)
