"""Finds stop strings in a text that arrives in parts. Independent of tokens."""

from array import array
from collections.abc import Iterable

_NONE = -1
_NO_CHAR = "\udfff"
"""Half of a surrogate pair, which no text contains."""


class StopStrings:
    """A request's stop strings as an Aho-Corasick automaton, shared by its sequences: a search takes time in proportion
    to the text only, for any strings.

    A state is the longest suffix of the text that begins a stop string. States are numbered as the strings are read, so
    that nearly every longer state has the next number; where strings diverge, ``branches`` has the others.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """``stops`` contains no empty string."""
        self.stops = sorted(set(stops))
        self.starts = frozenset(stop[0] for stop in self.stops)
        """A text without these characters begins no stop string."""
        self.next_char = _NO_CHAR
        """For each state, the character that leads to the state after it."""
        self.branches: dict[int, dict[str, int]] = {}
        """The other characters, and the state after each, for states where stop strings diverge."""
        self.depth = array("i", [0])
        """For each state, its number of characters."""
        self.complete = array("i", [_NONE])
        """For each state, the index in ``stops`` of the longest one that the text ends with, or _NONE."""
        for index, stop in enumerate(self.stops):
            self._add(index, stop)
        self.shorter = self._link()
        """For each state, the next longest suffix of the text that begins a stop string."""

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for position, char in enumerate(stop):
            child = self._child(state, char)
            if child == _NONE:
                self._add_rest(state, stop[position:])
                state = len(self.depth) - 1
                break
            state = child
        self.complete[state] = index

    def _add_rest(self, state: int, rest: str) -> None:
        """Adds states for the rest of a stop string, after ``state``."""
        first = len(self.depth)
        if first == state + 1:
            self.next_char = self.next_char[:state] + rest + _NO_CHAR
        else:
            self.branches.setdefault(state, {})[rest[0]] = first
            self.next_char += rest[1:] + _NO_CHAR
        depth = self.depth[state]
        self.depth.extend(range(depth + 1, depth + 1 + len(rest)))
        self.complete.extend([_NONE] * len(rest))

    def _child(self, state: int, char: str) -> int:
        if self.next_char[state] == char:
            return state + 1
        others = self.branches.get(state)
        return _NONE if others is None else others.get(char, _NONE)

    def _link(self) -> "array[int]":
        """Returns ``shorter`` for all states, breadth first, since each needs those of the states above it."""
        shorter = array("i", bytes(4 * len(self.depth)))
        complete, level = self.complete, [0]
        while level:
            deeper = []
            for state in level:
                for char, child in self._children(state):
                    deeper.append(child)
                    if not state:
                        continue
                    end, found = shorter[state], _NONE
                    while (found := self._child(end, char)) == _NONE and end:
                        end = shorter[end]
                    shorter[child] = max(found, 0)
                    if complete[child] == _NONE:
                        complete[child] = complete[shorter[child]]
            level = deeper
        return shorter

    def _children(self, state: int) -> list[tuple[str, int]]:
        char = self.next_char[state]
        children = [] if char == _NO_CHAR else [(char, state + 1)]
        if state in self.branches:
            children += self.branches[state].items()
        return children


class StopWatch:
    """A search for the first complete stop string, or the longest of several that are complete at once."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0

    def restart(self) -> None:
        """Begins a text of its own."""
        self._state = 0

    @property
    def depth(self) -> int:
        """The number of characters at the end of the text so far that may begin a stop string."""
        return self._stops.depth[self._state]

    def find(self, text: str, ignored: bool = False) -> tuple[int, str] | None:
        """Continues with the next part of the text. Returns where in it a stop string ends, and which one; then the
        search is over. With ``ignored``, stop strings that end in this part do not count."""
        stops, state = self._stops, self._state
        next_char, branches, shorter, complete = stops.next_char, stops.branches, stops.shorter, stops.complete
        for end, char in enumerate(text, start=1):
            while next_char[state] != char:
                others = branches.get(state)
                if others is not None and char in others:
                    state = others[char]
                    break
                if not state:
                    break
                state = shorter[state]
            else:
                state += 1
            if complete[state] >= 0 and not ignored:
                return end, stops.stops[complete[state]]
        self._state = state
        return None
