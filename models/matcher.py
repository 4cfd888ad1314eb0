"""Follows a row's output through its grammar. Knows no batch, and no thread but the caller's."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the library is there where a row has a grammar
    from llguidance import LLMatcher

FAILURE = "what the output must match became too costly to follow: make the constraint simpler"
DEAD_END = "the constraint allows this beginning of an output, but nothing can follow it: correct the constraint"


class RowMatcher:
    """Of one row. It looks at the row's history whenever it is asked, and so needs to be told of nothing: neither of
    tokens, nor of drafts that were not chosen, nor of a worker that begins anew."""

    def __init__(self, compiled: "Future[LLMatcher]", num_prompt_tokens: int, vocab_size: int) -> None:
        """``vocab_size``: of the model."""
        self._vocab_size = vocab_size
        self.compiled = compiled
        """Brings a matcher that nobody changes, or GrammarError."""
        self._num_consumed = num_prompt_tokens
        """Tokens of the history that the matcher is past, those of the prompt included."""
        self._matcher: LLMatcher | None = None
        self.failure = ""
        """Why the output cannot go on, fit for its caller's eyes."""
        self.is_dead_end = False
        """Whether that is since its grammar allows nothing more."""
        self._failed_at = 0
        """The position from which on it cannot."""

    def at(self, history: Sequence[int], end: int) -> "LLMatcher | None":
        """The library's matcher, after ``history[:end]``; None where the output cannot go on. Waits until the grammar
        is compiled. The caller leaves it where it stands."""
        if self.failure:
            return None
        if self._matcher is None:
            try:
                self._matcher = self.compiled.result().deep_copy()
            except Exception:
                # What the service could compile this process cannot, perhaps for want of memory.
                self.fail(end)
                return None
        new = list(history[self._num_consumed : end])
        if new and not self._matcher.consume_tokens(new):
            self.fail(end)
            return None
        self._num_consumed = end
        return self._matcher

    def fail(self, position: int) -> None:
        """No token can be chosen for this position. Why, the library says in words of the caller's, which no message
        repeats."""
        self._failed_at = position
        # An error of the library is about its limits, except for this one.
        error = "" if self._matcher is None else self._matcher.get_error()
        self.is_dead_end = self._matcher is not None and (not error or error.startswith("NoExtension"))
        self.failure = DEAD_END if self.is_dead_end else FAILURE
        self._matcher = None

    def fails_at(self, position: int) -> bool:
        """Whether what is chosen for it is no output: it only stands for the end."""
        return bool(self.failure) and position >= self._failed_at

    def forced(self, history: Sequence[int], at_most: int) -> Sequence[int]:
        """Tokens that follow the history if the text that must come is tokenized as the tokenizer would; often none.
        All of the history is known."""
        if self._matcher is None:  # nothing was sampled yet
            return ()
        matcher = self.at(history, len(history))
        token_ids = [] if matcher is None else matcher.compute_ff_tokens()[:at_most]
        # The tokenizer may spell the text with tokens that the model lacks.
        return list(takewhile(lambda token_id: token_id < self._vocab_size, token_ids))

    def num_valid(self, history: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts may follow the history, one after the other."""
        if self._matcher is None:
            return 0
        matcher = self.at(history, len(history))
        return 0 if matcher is None else matcher.validate_tokens(list(drafts))
