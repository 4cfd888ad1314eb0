"""Finds out whether the text of a sequence repeats itself, since drafts from its own text pay only then."""

import sys
from array import array

MATCH = 8
"""The number of last tokens that must have occurred before. Prose seldom repeats as many."""
LONG_MATCH = 2 * MATCH
"""The same where many sequences decode: a draft takes nearly as long as a token there, so only a long repetition
pays."""
MAX_UNPAID = 4
"""After this many consecutive steps in which no draft was accepted, a sequence has no more drafts for a while."""
MIN_WAIT, MAX_WAIT = 16, 1024
"""The number of tokens that a sequence then waits, at least and at most. The wait doubles each time that drafts did not
pay."""
PORTION = 8192
"""The most tokens that a look adds to the text. A long prompt takes several looks."""
MAX_VOCAB_SIZE = sys.maxunicode + 1
"""How many token ids there may be, since each becomes a character: strings are searched fast, without an index."""
LOOK_S, TOKEN_S, ADDED_TOKEN_S = 4e-6, 1e-9, 1e-8
"""The assumed time of a look, and of each token of the text and each new one: the worker's data has replaced the text
in the caches, which takes twice as long. It is not measured, so that what is found does not depend on the clock."""

_ENCODING = f"utf-32-{'le' if sys.byteorder == 'little' else 'be'}"


class Repetition:
    """What is known about the repetition in a sequence's text."""

    __slots__ = ("_num_accepted", "_num_unpaid", "_text", "_wait", "is_found", "next_look")

    def __init__(self) -> None:
        self._text = ""
        """The sequence's tokens so far, each as a character."""
        self.is_found = False
        """Whether the text repeats itself, so that the sequence may have drafts."""
        self.next_look = MATCH + 1
        """The number of tokens from which the text is searched."""
        self._wait = MIN_WAIT
        self._num_unpaid = 0
        """The number of steps since drafts were last accepted."""
        self._num_accepted = 0
        """The number of drafts accepted since the repetition was found."""

    def look(self, token_ids: list[int], *, is_crowded: bool = False) -> float:
        """Searches the text for its last tokens, and sets ``is_found``. ``is_crowded``: many sequences decode. Returns
        the seconds that this is assumed to take."""
        match = LONG_MATCH if is_crowded else MATCH
        done = len(self._text)
        added = token_ids[done : done + PORTION]
        self._text += array("I", added).tobytes().decode(_ENCODING, "surrogatepass")
        length = len(self._text)
        if length == len(token_ids):
            self.is_found = length > match and self._text.find(self._text[-match:], 0, length - 1) >= 0
            self._num_unpaid = self._num_accepted = 0
        return LOOK_S + TOKEN_S * length + ADDED_TOKEN_S * len(added)

    def count(self, num_accepted: int, num_tokens: int) -> None:
        """Counts a step with room for drafts, after which the sequence has ``num_tokens``. Unsets ``is_found`` if
        drafts do not pay."""
        self._num_accepted += num_accepted
        self._num_unpaid = 0 if num_accepted else self._num_unpaid + 1
        if self._num_unpaid == MAX_UNPAID:
            self.is_found = False
            self._wait = MIN_WAIT if self._num_accepted > MAX_UNPAID else min(2 * self._wait, MAX_WAIT)
            self.next_look = num_tokens + self._wait
