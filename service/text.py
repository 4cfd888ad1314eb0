"""One choice's tokens as text, as they come: whole characters, and never what may turn out to be a stop string.

Text is let go at the ends of tokens, so that what is released is exactly the text of the tokens released with it. All
of it together is what ``Tokenizer.decode`` makes of the same ids. A token costs a look-up; nothing is decoded twice.
"""

from collections import deque
from collections.abc import Callable, Iterable

from penstock.scheduler.request import Released, TextState
from penstock.service.characters import ByteRun, Join, Utf8
from penstock.service.stop_strings import StopStrings
from penstock.service.tokenizer import Tokenizer

_NOTHING = Released(0, "")
_ONE_TOKEN = Released(1, "")


def text_states(
    tokenizer: Tokenizer, stops: Iterable[str] = (), include_special_tokens: bool = False
) -> Callable[[], TextState]:
    """Makes the text states of one request's choices, which share what can be shared. ``stops`` are not empty."""
    shared = StopStrings(stops)
    return lambda: IncrementalText(tokenizer, shared, include_special_tokens)


class IdsOnly:
    """For a request that wants token ids alone and has no stop strings: nothing is held, and no text is made."""

    def feed(self, token_id: int) -> Released:
        """The token itself."""
        return _ONE_TOKEN

    def finish(self) -> Released:
        """Nothing is left."""
        return _NOTHING


class IncrementalText:
    """The text of one choice. A stop string ends it: the one that is complete first, and the longest of those that are
    complete with the same character."""

    def __init__(
        self, tokenizer: Tokenizer, stops: StopStrings | Iterable[str] = (), include_special_tokens: bool = False
    ) -> None:
        pieces = tokenizer.pieces
        stops = stops if isinstance(stops, StopStrings) else StopStrings(stops)
        self._pieces = pieces
        self._texts = pieces.all if include_special_tokens else pieces.ordinary
        self._passed_over = pieces.unknown if include_special_tokens else pieces.skipped
        self._starts = stops.starts
        self._watch = stops.watch()
        self._held: deque[tuple[int, str]] = deque()
        """What may belong to a stop string: texts, each with the number of tokens that it is the text of."""
        self._num_held_chars = 0
        self._join: Join = ByteRun() if pieces.decodes_runs else Utf8()
        self._num_joining = 0
        """Tokens that ``_join`` is not done with."""
        self._opens = pieces.opens_differently
        self._num_to_strip = pieces.num_stripped
        self._is_plain = not self._opens and not self._num_to_strip
        """Whether the next token's text follows from that token alone, if it has one."""

    def feed(self, token_id: int) -> Released:
        """Takes an output token; releases any number of tokens, the oldest first."""
        text = self._texts[token_id]
        if text is None or not self._is_plain:
            return self._feed_joined(token_id)
        if not self._num_held_chars and self._starts.isdisjoint(text):
            return Released(1, text)
        return self._match(1, text)

    def finish(self) -> Released:
        """Releases all that is held. A stop string that is complete only now still ends the text before it."""
        released = _NOTHING
        if self._num_joining:
            released = self._match_joined(self._join.end())
        return released if released.stop is not None else _sum(released, self._release(0))

    def _feed_joined(self, token_id: int) -> Released:
        """A token at the beginning of a text, or one that begins, continues or follows the bytes of a character."""
        released = _NOTHING
        if token_id in self._passed_over:
            if self._num_joining:
                self._num_joining += 1
            else:
                released = self._match(1, "")
        else:
            piece = self._pieces.split.get(token_id) or self._texts[token_id]
            if self._opens:
                piece = self._pieces.opening(token_id)
                self._opens = False
            assert piece is not None, "a token is text or bytes"
            before, text = self._join.add(piece)
            if before is not None:
                released = self._match_joined(before)
            if released.stop is None:
                self._num_joining += 1
                if text is not None:
                    released = _sum(released, self._match_joined(text))
        self._is_plain = not (self._num_joining or self._opens or self._num_to_strip)
        return released

    def _match_joined(self, text: str) -> Released:
        num_tokens, self._num_joining = self._num_joining, 0
        return self._match(num_tokens, text)

    def _match(self, num_tokens: int, text: str) -> Released:
        """Takes the text of some tokens, and releases what can be no part of a stop string any more."""
        if self._num_to_strip:
            text = self._strip(text)
        self._held.append((num_tokens, text))
        found = self._watch.find(text)
        if found is not None:
            end, stop = found
            return self._cut(self._num_held_chars + end - len(stop), stop)
        self._num_held_chars += len(text)
        return self._release(self._watch.depth)

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text.startswith(" "):
                text = text[1:]
                self._num_to_strip -= 1
            else:
                self._num_to_strip = 0
        return text

    def _release(self, num_kept: int) -> Released:
        """Lets go of the oldest tokens: as many as leave at least ``num_kept`` characters."""
        num_tokens, texts = 0, []
        num_spare = self._num_held_chars - num_kept
        while self._held and len(self._held[0][1]) <= num_spare:
            number, text = self._held.popleft()
            num_tokens += number
            num_spare -= len(text)
            texts.append(text)
        self._num_held_chars = num_kept + num_spare
        return Released(num_tokens, "".join(texts))

    def _cut(self, begin: int, stop: str) -> Released:
        """Lets go of the held text before ``begin``, where a stop string begins, and of the tokens that it is of."""
        num_tokens, num_chars = 0, 0
        for number, text in self._held:
            if num_chars >= begin:
                break
            num_tokens += number
            num_chars += len(text)
        return Released(num_tokens, "".join(text for _, text in self._held)[:begin], stop)


def _sum(first: Released, second: Released) -> Released:
    return Released(first.num_tokens + second.num_tokens, first.text + second.text, second.stop)
