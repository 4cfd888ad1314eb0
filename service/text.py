"""One choice's tokens as text, as they come: whole characters, and never what may turn out to be a stop string.

Text is let go at the ends of tokens, so that what is released is exactly the text of the tokens released with it; all
of it together is what ``Tokenizer.decode`` makes of the same ids. A token costs a look-up; nothing is decoded twice.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.scheduler.request import Released, TextState
from penstock.service.pieces import Pieces
from penstock.service.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_HELD = Released(0, "")


def text_states(
    tokenizer: Tokenizer, stops: Iterable[str] = (), include_special_tokens: bool = False
) -> Callable[[], TextState]:
    """Makes the text states of a request's choices; what they share is made once. ``stops`` are not empty strings."""
    shared = StopStrings(stops)
    return lambda: IncrementalText(tokenizer, shared, include_special_tokens)


class IdsOnly:
    """For a request that wants token ids alone and has no stop strings: nothing is held, no text is made."""

    def feed(self, token_id: int) -> Released:
        """The token itself."""
        return _ONE_TOKEN

    def finish(self) -> Released:
        """Nothing is left."""
        return _HELD


_ONE_TOKEN = Released(1, "")


class IncrementalText:
    """Text of a choice. The first match of a stop string ends it: the one that is complete first; of those that are
    complete with the same character, the longest."""

    def __init__(
        self, tokenizer: Tokenizer, stops: "StopStrings | Iterable[str]" = (), include_special_tokens: bool = False
    ) -> None:
        pieces = tokenizer.pieces
        self._texts = pieces.all if include_special_tokens else pieces.ordinary
        passed_over = pieces.unknown if include_special_tokens else pieces.skipped
        self._join: _Join = _Runs(pieces, passed_over) if pieces.decodes_runs else _Utf8(pieces, passed_over)
        self._start: _Start | None = _Start(pieces, passed_over)
        self._stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._state = 0
        """Of ``_stops``: what the released and held text ends with."""
        self._num_joining = 0
        """Tokens in ``_join``."""
        self._held: deque[tuple[int, str]] = deque()
        """Whole pieces of text that wait for a stop string to be decided, each with its number of tokens."""

    def feed(self, token_id: int) -> Released:
        """Takes an output token. What it releases may be more tokens than one, or none."""
        text = self._texts[token_id]
        if text is None or self._num_joining or self._start is not None:
            return self._feed_unusual(token_id, text)
        if not self._state and self._stops.starts.isdisjoint(text):
            return Released(1, text)
        return self._match(1, text)

    def finish(self) -> Released:
        """Releases all that is held; a stop string that only now is complete still counts."""
        released = _HELD
        if self._num_joining:
            released = self._match(self._num_joining, self._join.end())
            self._num_joining = 0
        if released.stop is None:
            rest = "".join(text for _, text in self._held)
            released = Released(
                released.num_tokens + sum(number for number, _ in self._held), released.text + rest
            )
        self._held.clear()
        return released

    def _feed_unusual(self, token_id: int, text: str | None) -> Released:
        """The first tokens of a text, and those that begin, continue or follow bytes of a character."""
        if self._start is not None:
            text = self._start.adjust(token_id, text)
            if self._start.is_over:
                self._start = None
        if text is not None and not self._num_joining:
            return self._match(1, text)
        closed, text = self._join.add(token_id, text)
        released = _HELD
        if closed is not None:
            released = self._match(self._num_joining, closed)
            self._num_joining = 0
        self._num_joining += 1
        if text is None or released.stop is not None:
            return released
        number, self._num_joining = self._num_joining, 0
        return _sum(released, self._match(number, text))

    def _match(self, num_tokens: int, text: str) -> Released:
        """Takes the whole text of some tokens, and releases what can be no part of a stop string any more."""
        state, end, stop = self._stops.run(self._state, text)
        self._state = state
        self._held.append((num_tokens, text))
        if stop is not None:
            return self._cut(len(text) - end + len(stop), stop)
        num_kept = self._stops.depth[state]
        return self._release(num_kept)

    def _release(self, num_kept: int) -> Released:
        """Lets go of the oldest tokens, as many as leave at least ``num_kept`` characters."""
        held = self._held
        num_tokens, texts = 0, []
        spare = sum(len(text) for _, text in held) - num_kept
        while held and len(held[0][1]) <= spare:
            number, text = held.popleft()
            spare -= len(text)
            num_tokens += number
            texts.append(text)
        return Released(num_tokens, "".join(texts))
