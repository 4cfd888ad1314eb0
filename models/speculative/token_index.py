"""An index of the token pairs in a growing sequence, and a row's place in it. For drafters that need no model."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

MAX_OCCURRENCES = 32
"""The most places of a pair that are looked at, newest first. Limits the time of a step if a pair is everywhere."""

PAIR = 2


class TokenIndex:
    """Finds where a pair of tokens occurs in a sequence. A place is the position of the token that follows the pair.

    ``tokens[0]`` has the position ``start``, which ``cut`` advances. Indexing takes constant time per token. The places
    of a pair are chained from the newest to the oldest, as in compressors of the LZ77 family.
    """

    def __init__(self, tokens: list[int]) -> None:
        """``tokens`` belongs to the caller, which appends to it."""
        self.tokens = tokens
        self.start = 0
        self._newest: dict[int, int] = {}
        """The newest place of each pair, whose tokens are packed into one number."""
        self._older = array("q")
        """The next older place of the same pair, or -1, for each place from ``start`` on."""

    @property
    def num_indexed(self) -> int:
        """The number of tokens at the beginning of the sequence that are indexed."""
        return len(self._older)

    def extend(self, limit: int) -> int:
        """Indexes up to ``limit`` more tokens. Returns how many."""
        tokens, done = self.tokens, len(self._older)
        end = min(len(tokens), done + limit)
        if end <= done:
            return 0
        newest, older, begin = self._newest, self._older, max(done, PAIR)
        older.extend([-1] * (min(end, PAIR) - done))  # no pair comes before the first two
        for place in range(begin, end):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            older.append(newest.get(pair, -1))
            newest[pair] = self.start + place
        return end - done

    def cut(self, count: int) -> None:
        """Removes the first ``count`` tokens."""
        tokens, newest = self.tokens, self._newest
        for place in range(PAIR, min(count + PAIR, len(self._older))):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            if newest[pair] == self.start + place:
                del newest[pair]
        del self._older[:count], tokens[:count]
        self.start += count

    def places(self, first: int, second: int) -> Iterator[int]:
        """Yields the indices in ``tokens`` of the tokens that followed the pair, newest first."""
        start, older = self.start, self._older
        place = self._newest.get(first << 32 | second, -1)
        while place >= start:
            yield place - start
            place = older[place - start]


class Match(NamedTuple):
    """The longest suffix of a history that occurs in a sequence."""

    length: int
    """0 if there is none."""
    places: list[int]
    """Indices into the sequence's tokens of what followed it, likeliest first."""


NO_MATCH = Match(0, [])


class Cursor:
    """A row's place in an index. A match that continues the last one is found at once, however many newer places the
    last pair has."""

    __slots__ = ("_length", "_place", "index")

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self._place = self._length = -1
        """The place of the last match, and the length of the history then."""

    def find(self, history: list[int], longest: int, enough: int) -> Match:
        """Returns the longest suffix of ``history``, of 2 to ``longest`` tokens, that occurs at the places looked at,
        and all of those that have it. Stops after ``enough`` matches of the maximum length."""
        index, longest = self.index, min(longest, len(history))
        if longest < PAIR:
            return NO_MATCH
        tokens, length, tail = index.tokens, PAIR, history[-PAIR:]
        places: list[int] = []
        for place in islice(self._candidates(history), MAX_OCCURRENCES):
            # One comparison rules out most places that are no better.
            if place < length or tokens[place - length : place] != tail:
                continue
            longer = length
            while longer < longest and longer < place and tokens[place - longer - 1] == history[-longer - 1]:
                longer += 1
            if longer > length:
                length, tail, places = longer, history[-longer:], []
            places.append(place)
            if len(places) >= enough and length == longest:
                break
        self._place, self._length = (index.start + places[0] if places else -1), len(history)
        return Match(length, places) if places else NO_MATCH

    def _candidates(self, history: list[int]) -> Iterable[int]:
        index = self.index
        places = index.places(history[-2], history[-1])
        if self._place < 0:
            return places
        likely = self._place + len(history) - self._length - index.start
        if not 0 <= likely < len(index.tokens):
            return places
        return chain((likely,), (place for place in places if place != likely))
