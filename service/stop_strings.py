"""Finds stop strings in a text that comes in parts. Knows no tokens."""

from array import array
from collections.abc import Iterable


class StopStrings:
    """A request's stop strings, made ready once and shared by its choices: each with its failure function, as Knuth,
    Morris and Pratt have it. Whatever the strings are, a search costs their number times the text's length."""

    def __init__(self, stops: Iterable[str]) -> None:
        """``stops`` are not empty strings."""
        # Longest first, so that of two which are complete at once the first found is the one to report.
        self._stops = [(stop, _failure(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self.starts = frozenset(stop[0] for stop, _ in self._stops)
        """A text without these characters begins no stop string."""

    def watch(self) -> "StopWatch":
        """A new search."""
        return StopWatch(self._stops)


class StopWatch:
    """A search for the first stop string: the one that is complete first, and the longest of those complete at once."""

    def __init__(self, stops: list[tuple[str, "array[int]"]]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)
        self.depth = 0
        """How many characters at the end of the text so far may be the beginning of a stop string."""

    def find(self, text: str) -> tuple[int, str] | None:
        """Goes on with the next part of the text: where in it a stop string ends, and which. That is the last call."""
        matched = self._matched
        for end, char in enumerate(text, start=1):
            for index, (stop, failure) in enumerate(self._stops):
                length = matched[index]
                while length and stop[length] != char:
                    length = failure[length]
                if stop[length] == char:
                    length += 1
                    if length == len(stop):
                        return end, stop
                matched[index] = length
        self.depth = max(matched, default=0)
        return None


def _failure(stop: str) -> "array[int]":
    """Entry k: the length of the longest text that both begins and ends ``stop[:k]`` and is shorter than it."""
    failure = array("i", [0, 0])
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = failure[length]
        if stop[length] == char:
            length += 1
        failure.append(length)
    return failure
