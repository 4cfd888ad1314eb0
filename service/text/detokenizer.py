"""Incremental detokenization of one sequence: releases whole characters, and holds text that may begin a stop string.

Text is released at the ends of tokens, so that it is exactly the text of the tokens released with it. All released text
together is what ``Tokenizer.decode`` makes of the same ids. A token costs one look-up; nothing is decoded twice.

The DecodeStream of ``tokenizers`` is not used. It drops a character that is incomplete at the end, and it decodes the
tokens of an incomplete character again for each new token, so that 4,000 stray bytes cost 1 ms per token.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from penstock.scheduler.request import TextDelta, TextState
from penstock.service.text.stop_strings import StopStrings, StopWatch
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.utf8 import ByteRun, Utf8

_NOTHING = TextDelta(0, "")
_ONE_TOKEN = TextDelta(1, "")

Lengths = tuple[int, ...]
"""The number of characters of a text that begin in each of its tokens."""


def text_states(
    tokenizer: Tokenizer,
    stops: Sequence[str] = (),
    include_special_tokens: bool = False,
    min_tokens: int = 0,
    shown_ids: frozenset[int] = frozenset(),
) -> Callable[[], TextState]:
    """Returns a factory for the text states of one request's sequences, which share their tables. ``stops`` contains no
    empty string. Stop strings that end in the first ``min_tokens`` tokens are ignored. ``shown_ids`` are special tokens
    that the text includes in any case."""
    shared = StopStrings(stops)
    if include_special_tokens:
        shown_ids = tokenizer.special_ids
    named = tokenizer.special_tokens_in("\0".join(stops)) if stops else {}
    hidden = {token_id: text for token_id, text in named.items() if token_id not in shown_ids}
    return lambda: IncrementalDetokenizer(tokenizer, shared, shown_ids, min_tokens, hidden)


class IdsOnly:
    """The text state of a request for token ids only, without stop strings: holds nothing and makes no text."""

    def feed(self, token_id: int) -> TextDelta:
        return _ONE_TOKEN

    def finish(self) -> TextDelta:
        return _NOTHING

    def restart(self) -> None:
        """Does nothing: each token is by itself."""


class IncrementalDetokenizer:
    """The text of one sequence. The first complete stop string ends it, or the longest of several that are complete
    with the same character."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings,
        shown_ids: frozenset[int],
        min_tokens: int,
        named: Mapping[int, str],
    ) -> None:
        """``shown_ids``: the special tokens that the text includes. ``named``: others, in stop strings. They are
        matched even though the text does not include them."""
        self._pieces = pieces = tokenizer.pieces
        shows_all = shown_ids is tokenizer.special_ids
        self._texts = pieces.all if shows_all else pieces.showing(shown_ids)
        self._passed_over = pieces.unknown if shows_all else pieces.skipped - shown_ids
        self._starts = stops.starts
        self._watch = StopWatch(stops)
        self._named = named
        self._num_early = min_tokens
        """Number of next tokens in which stop strings are still ignored; -1 once they count."""
        self._held: deque[tuple[Lengths, str, bool]] = deque()
        """Texts that may belong to a stop string, each with its lengths per token, and whether it is shown."""
        self._num_held_chars = 0
        self._join: ByteRun | Utf8 = ByteRun() if pieces.decodes_runs else Utf8()
        self._joining: list[str | bytes] = []
        """The tokens' texts or bytes that ``_join`` still holds."""
        self.restart()

    def restart(self) -> None:
        self._watch.restart()
        self._opens = self._pieces.opens_differently
        self._num_to_strip = self._pieces.num_stripped
        self._is_plain = not self._opens and not self._num_to_strip
        """Whether the next token's text depends only on that token, if it has text."""

    def feed(self, token_id: int) -> TextDelta:
        """Adds an output token; releases any number of tokens, the oldest first."""
        if self._num_early >= 0:
            self._num_early -= 1
        if token_id in self._named:
            return self._feed_named(token_id)
        text = self._texts[token_id]
        if text is None or not self._is_plain:
            return self._feed_joined(token_id)
        if not self._num_held_chars and self._starts.isdisjoint(text):
            return TextDelta(1, text)
        return self._match((len(text),), text)

    def finish(self) -> TextDelta:
        """Releases everything that is held. A stop string that is complete only now still ends the text before it."""
        released = _NOTHING
        if self._joining:
            released = self._match_joined(self._join.end())
        return released if released.stop is not None else _sum(released, self._release(0))

    def _feed_named(self, token_id: int) -> TextDelta:
        """Adds a special token that is in a stop string but not shown in the text. It counts as before a character that
        is still incomplete."""
        lengths: Lengths = (0,)
        if self._joining:
            self._joining.append(b"")
            lengths = ()
        return self._match(lengths, self._named[token_id], is_shown=False)

    def _feed_joined(self, token_id: int) -> TextDelta:
        """Adds a token at the beginning of a text, or one that begins, continues or follows the bytes of a
        character."""
        released = _NOTHING
        if token_id in self._passed_over:
            if self._joining:
                self._joining.append(b"")
            else:
                released = self._match((0,), "")
        else:
            piece = self._pieces.split.get(token_id) or self._texts[token_id]
            if self._opens:
                piece = self._pieces.opening(token_id)
                self._opens = False
            assert piece is not None, "a token is text or bytes"
            before, text = self._join.add_piece(piece)
            if before is not None:
                released = self._match_joined(before)
            if released.stop is None:
                self._joining.append(piece)
                if text is not None:
                    released = _sum(released, self._match_joined(text))
        self._is_plain = not (self._joining or self._opens or self._num_to_strip)
        return released

    def _match_joined(self, text: str) -> TextDelta:
        pieces, self._joining = self._joining, []
        return self._match(_lengths(pieces, text), text)

    def _match(self, lengths: Lengths, text: str, is_shown: bool = True) -> TextDelta:
        """Adds the text of some tokens, and releases text that can no longer be part of a stop string."""
        if self._num_to_strip and is_shown:
            stripped = self._strip(text)
            lengths = _without_first(lengths, len(text) - len(stripped))
            text = stripped
        self._held.append((lengths, text, is_shown))
        found = self._watch.find(text, ignored=self._num_early >= 0)
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

    def _release(self, num_kept: int) -> TextDelta:
        """Releases the oldest tokens, and keeps at least ``num_kept`` characters."""
        lengths: list[int] = []
        texts = []
        num_spare = self._num_held_chars - num_kept
        while self._held and len(self._held[0][1]) <= num_spare:
            some, text, is_shown = self._held.popleft()
            lengths += some
            num_spare -= len(text)
            if is_shown:
                texts.append(text)
        self._num_held_chars = num_kept + num_spare
        return TextDelta(len(lengths), "".join(texts), lengths=tuple(lengths) if len(lengths) > 1 else None)

    def _cut(self, begin: int, stop: str) -> TextDelta:
        """Releases the held text before ``begin``, where a stop string begins, with its tokens."""
        num_tokens, num_chars = 0, 0
        lengths: list[int] = []
        texts = []
        for some, text, is_shown in self._held:
            lengths += some
            if num_chars < begin:
                num_tokens += len(some)
                texts += [text[: begin - num_chars]] * is_shown
            num_chars += len(text)
        return TextDelta(num_tokens, "".join(texts), stop, tuple(lengths))


def text_offsets(tokenizer: Tokenizer, token_ids: Iterable[int], include_special_tokens: bool = False) -> list[int]:
    """Returns the offset of each token in the text of all of them."""
    state = text_states(tokenizer, include_special_tokens=include_special_tokens)()
    lengths = [length for token_id in token_ids for length in state.feed(token_id).text_lengths()]
    return list(accumulate([*lengths, *state.finish().text_lengths()], initial=0))[:-1]


def _lengths(pieces: Sequence[str | bytes], text: str) -> Lengths:
    """Returns the number of characters of ``text`` that begin in each of the pieces that it was joined from."""
    if len(pieces) == 1:
        return (len(text),)
    parts = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    if sum(map(len, parts)) == len(text):  # also where each byte became U+FFFD
        return tuple(map(len, parts))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    lengths, num_decoded, before = [], 0, 0
    for part in parts:
        num_decoded += len(decoder.decode(part))
        begun = min(num_decoded + bool(decoder.getstate()[0]), len(text))
        lengths.append(begun - before)
        before = begun
    lengths[-1] += len(text) - before
    return tuple(lengths)


def _without_first(lengths: Lengths, num_chars: int) -> Lengths:
    """Returns the lengths for a text without its first ``num_chars`` characters."""
    left = list(lengths)
    for index, length in enumerate(left):
        lost = min(length, num_chars)
        left[index] -= lost
        num_chars -= lost
    return tuple(left)


def _sum(first: TextDelta, second: TextDelta) -> TextDelta:
    if not first.num_tokens:
        return second
    lengths = first.text_lengths() + second.text_lengths()
    return TextDelta(first.num_tokens + second.num_tokens, first.text + second.text, second.stop, lengths)
