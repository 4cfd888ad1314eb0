"""Where tokens occurred before: an index of the pairs in a sequence that grows, and a row's place in it. For drafters
that need no model."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import NamedTuple

MAX_OCCURRENCES = 32
"""Of a pair that are looked at, the newest ones: what a step pays for a pair that is everywhere."""

PAIR = 2


class TokenIndex:
    """Tells where a pair of tokens occurs in a sequence. A place is named by the position of the token that follows it.

    ``tokens[0]`` has the position ``start``, which ``cut`` moves on. Indexing costs the same for every token, and a
    pair's places are chained from the newest to the oldest, as compressors of LZ77's family do it.
    """

    def __init__(self, tokens: list[int]) -> None:
        """``tokens`` is the caller's, who appends to it."""
        self.tokens = tokens
        self.start = 0
        self._newest: dict[int, int] = {}
        """Of a pair, as one number: its newest place."""
        self._older = array("q")
        """By place, from ``start`` on: the next older one of the same pair; -1: there is none."""

    @property
    def num_indexed(self) -> int:
        """Tokens at the beginning of the sequence that are indexed."""
        return len(self._older)

    def extend(self, limit: int) -> int:
        """Indexes up to so many tokens more; returns how many."""
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
        """Forgets the first tokens."""
        tokens, newest = self.tokens, self._newest
        for place in range(PAIR, min(count + PAIR, len(self._older))):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            if newest[pair] == self.start + place:
                del newest[pair]
        del self._older[:count], tokens[:count]
        self.start += count

    def places(self, first: int, second: int) -> Iterator[int]:
        """Indices into ``tokens`` of what followed the pair, the newest first."""
        start, older = self.start, self._older
        place = self._newest.get(first << 32 | second, -1)
        while place >= start:
            yield place - start
            place = older[place - start]


class Match(NamedTuple):
    """The longest end of a history that is found in a sequence."""

    length: int
    """0: none is."""
    places: list[int]
    """Indices into the sequence's tokens of what followed it, the likeliest first."""


NO_MATCH = Match(0, [])


class Cursor:
    """A row's place in an index. A match that goes on as it did last time is found again at once, however many newer
    places the last pair has."""

    __slots__ = ("_length", "_place", "index")

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self._place = self._length = -1
        """Where the last match was, and how long the history was then."""

    def find(self, history: list[int], longest: int, enough: int) -> Match:
        """The longest end of ``history``, of 2 to ``longest`` tokens, among the places that are looked at, and all of
        these that have it; of matches as long as can be only the first ones, as many as are ``enough``."""
        index, longest = self.index, min(longest, len(history))
        if longest < PAIR:
            return NO_MATCH
        tokens, length, tail = index.tokens, PAIR, history[-PAIR:]
        places: list[int] = []
        for place in islice(self._candidates(history), MAX_OCCURRENCES):
            # One comparison tells of most places that they are no better.
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
