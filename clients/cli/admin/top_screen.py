"""The screen of ``penstock top``: the statistics, or the live requests with one that is selected. Knows neither the
terminal nor the service."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import penstock.v1 as pb
from penstock.clients.cli.admin.request_list import HEADER, request_line
from penstock.clients.cli.admin.stats_view import Rates, dashboard, title

_GOOD, _BAD, _SELECTED = "1;32", "1;31", "7"
"""Bold green, bold red, reverse."""
_LINES_AROUND = 7
"""The lines of the list's screen that are not requests, and the last one, where the cursor is."""


class Key(Enum):
    """A key that means something here."""

    REQUESTS = "r"
    CANCEL = "x"
    CONFIRM = "y"
    QUIT = "q"
    UP = "\x1b[A"
    DOWN = "\x1b[B"
    OTHER = ""


class ScreenAction(Enum):
    """The action of a key."""

    DRAW = auto()
    LIST = auto()
    """Read the live requests."""
    CANCEL = auto()
    """Cancel the request ``to_cancel``."""
    QUIT = auto()


@dataclass
class TopScreen:
    """What is shown, and what keys change of it."""

    target: str
    unicode: bool
    """Whether the terminal shows more than ASCII."""
    colours: bool
    has_keys: bool
    """Whether the terminal has a keyboard."""
    shows_requests: bool = False
    to_cancel: str = ""
    """The request whose cancellation the next key confirms, or has confirmed."""
    message: str = ""
    """The outcome of the last action, or an error; shown until the next key."""
    _stats: pb.WatchStatsResponse = field(default_factory=pb.WatchStatsResponse)
    _before: pb.WatchStatsResponse | None = None
    _history: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    _requests: list[pb.LiveRequest] = field(default_factory=list)
    _selected: int = 0
    _asks: bool = False

    def update(self, stats: pb.WatchStatsResponse) -> None:
        """Takes new statistics."""
        before, self._stats = self._stats, stats
        self._before = before if before.HasField("uptime") else None
        if self._before is not None:
            self._history.append(Rates.between(self._before, stats).output_tokens)

    def set_requests(self, requests: list[pb.LiveRequest]) -> None:
        """Takes the live requests, the oldest first. The same one stays selected; if it has ended, the one after it."""
        if self._requests:
            ended = {live.request_id for live in self._requests} - {live.request_id for live in requests}
            self._selected -= sum(live.request_id in ended for live in self._requests[: self._selected])
        self._requests = requests
        self._select(self._selected)

    def press(self, key: Key) -> ScreenAction:
        """Changes the screen; returns what else is to be done."""
        self.message = ""
        if self._asks:
            self._asks = False
            return ScreenAction.CANCEL if key is Key.CONFIRM else ScreenAction.DRAW
        if key is Key.QUIT:
            return ScreenAction.QUIT
        if key is Key.REQUESTS:
            self.shows_requests = not self.shows_requests
            return ScreenAction.LIST if self.shows_requests else ScreenAction.DRAW
        if self.shows_requests and self._requests:
            if key in (Key.UP, Key.DOWN):
                self._select(self._selected + (1 if key is Key.DOWN else -1))
            elif key is Key.CANCEL:
                self._asks, self.to_cancel = True, self._requests[self._selected].request_id
        return ScreenAction.DRAW

    def lines(self, columns: int, rows: int) -> list[str]:
        """Returns the lines, which fit on a terminal of this size with an empty one below."""
        if self.shows_requests:
            screen = self._list(max(1, rows - _LINES_AROUND))
        else:
            screen = dashboard(self.target, self._before, self._stats, self._history, self.unicode)
        lines = [text[: columns - 1] for text in screen]
        lines[0] = self._paint(lines[0], _GOOD if self._stats.state == pb.SERVICE_STATE_SERVING else _BAD)
        if self.shows_requests:
            return [self._paint(text, _SELECTED) if text.startswith("> ") else text for text in lines[: rows - 1]]
        hints = ["", self.message or "r requests   q quit"] if self.has_keys else []
        return [*lines[: max(1, rows - 1 - len(hints))], *hints][: rows - 1]

    def _list(self, room: int) -> Iterator[str]:
        """Yields the list, with ``room`` for requests."""
        yield title(self.target, self._stats)
        yield ""
        num_live, num_listed = max(self._stats.live_requests, len(self._requests)), len(self._requests)
        part = f"; the oldest {num_listed:,} are listed" if num_listed < num_live else ""
        yield f"{num_live:,} live requests{part}"
        yield f"  {HEADER}"
        first = max(0, min(self._selected - room // 2, num_listed - room))
        for index, live in enumerate(self._requests[first : first + room], first):
            yield f"{'>' if index == self._selected else ' '} {request_line(live)}"
        yield ""
        yield self._prompt()

    def _prompt(self) -> str:
        if self._asks:
            return f"cancel {self.to_cancel}? y cancels it, any other key does not"
        return self.message or "up and down select   x cancel   r statistics   q quit"

    def _select(self, index: int) -> None:
        self._selected = max(0, min(index, len(self._requests) - 1))

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colours else text
