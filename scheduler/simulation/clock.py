"""Virtual time: it passes only from one event to the next."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Runs actions at virtual times, in order. Actions for the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """The current time, in seconds."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Runs ``action`` at ``when``, or now if that has passed."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def run(self, until: float = float("inf")) -> None:
        """Runs the actions up to the given time, or until none is left."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heapq.heappop(events)
            action()
        if until < float("inf"):
            self.now = until
