"""A limited number of places. When all are taken, the oldest holder gives way to one that waits. Knows nothing of what
is done in them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from penstock.service.errors import ServiceError

_TURNS = 3
"""Turns of the event loop between the time at which a holder has to leave and the check whether it still holds its
place: input that arrived while the loop was busy is handled first."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The number of places, and how long one may be held."""

    total: int
    each: int
    """Places that one owner may hold."""
    max_waiting: int
    """How many may wait; further ones are refused at once."""
    hold_s: float
    """How long a place may be held while others wait."""
    patience_s: float | None
    """How long a place may be held in any case; None is no limit."""
    displaced: Callable[[], ServiceError]
    """Makes the error of holders that had to give way, and of those that could not even wait."""
    late: Callable[[], ServiceError] | None = None
    """Makes the error of holders whose ``patience_s`` is over."""


class Places:
    """Keeps track of holders and of those that wait, by owner. Belongs to the event loop."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._taken: dict[str, dict[Place, None]] = {}
        self._num_taken = 0
        self._waiting: dict[str, deque[Place]] = {}
        """By owner; the first owner is next."""
        self._num_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        """Fires when a holder has to give way."""
        self._late_timer: asyncio.TimerHandle | None = None
        """Fires when a holder's ``patience_s`` may be over. One for all: a timer for each place would cost more."""

    @property
    def num_taken(self) -> int:
        """Number of places that are held."""
        return self._num_taken

    def place(self, owner: str) -> "Place":
        """Returns a place, to be entered once by ``async with``."""
        return Place(self, owner)

    async def take(self, place: "Place") -> None:
        """Waits for a place. Raises ServiceError."""
        if not self._num_waiting and self._has_room(place.owner):
            self._give(place)
            return
        if self._num_waiting >= self.rules.max_waiting:
            raise self.rules.displaced()
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place.owner, deque()).append(place)
        self._num_waiting += 1
        self._admit()
        try:
            await place.turn
        except asyncio.CancelledError:
            if place.since is None:
                self._waiting[place.owner].remove(place)
                self._drop_turn(place.owner)
            else:
                self.leave(place)
            raise

    def leave(self, place: "Place") -> None:
        """Gives a place back."""
        mine = self._taken[place.owner]
        del mine[place]
        if not mine:
            del self._taken[place.owner]
        self._num_taken -= 1
        if self._num_waiting:
            self._admit()

    def _has_room(self, owner: str) -> bool:
        return self._num_taken < self.rules.total and len(self._taken.get(owner, ())) < self.rules.each

    def _give(self, place: "Place") -> None:
        loop = asyncio.get_running_loop()
        place.since = loop.time()
        if self._late_timer is None and self.rules.patience_s is not None:
            self._late_timer = loop.call_later(self.rules.patience_s, self._end_late)
        self._taken.setdefault(place.owner, {})[place] = None
        self._num_taken += 1

    def _admit(self) -> None:
        """Gives places to those that wait, one owner after the other, and makes others leave."""
        given = True
        while given:
            given = False
            for owner in list(self._waiting):
                if not self._has_room(owner):
                    continue
                given = True
                place = self._waiting[owner].popleft()
                self._drop_turn(owner)
                self._give(place)
                assert place.turn is not None
                if not place.turn.done():  # else it was cancelled, and leaves in a moment
                    place.turn.set_result(None)
        if self._num_waiting and self._timer is None:
            self._set_timer()

    def _drop_turn(self, owner: str) -> None:
        self._num_waiting -= 1
        waiting = self._waiting.pop(owner)
        if waiting:
            self._waiting[owner] = waiting  # behind the others

    def _end_late(self) -> None:
        loop, patience_s = asyncio.get_running_loop(), self.rules.patience_s
        assert patience_s is not None
        self._late_timer = None
        places = [place for mine in self._taken.values() for place in mine if not place.has_to_leave]
        for place in places:
            if place.since is not None and place.since + patience_s <= loop.time():
                place.end(is_late=True)
        left = [place.since for place in places if place.since is not None and not place.has_to_leave]
        if left:
            self._late_timer = loop.call_at(min(left) + patience_s, self._end_late)

    # ------------------------------------------------------------------------------------------------ who gives way

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        due = min(
            (victim.since + self.rules.hold_s for victim in self._oldest() if victim.since is not None), default=None
        )
        if due is not None:
            self._timer = loop.call_at(due, self._later, _TURNS)

    def _later(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            self._timer = loop.call_later(0, self._later, turns - 1)
            return
        self._timer = None
        now = loop.time()
        for victim in list(self._oldest()):
            if victim.since is not None and victim.since + self.rules.hold_s <= now:
                victim.end()
        if self._num_waiting:
            self._set_timer()

    def _oldest(self) -> Iterator["Place"]:
        """Yields who would give way to each owner that waits: its own oldest holder if it has all that it may have,
        else the oldest holder of the owner that has the most."""
        owners = {
            owner if len(self._taken.get(owner, ())) >= self.rules.each else max(self._taken, key=self._size)
            for owner in self._waiting
            if self._taken
        }
        for owner in owners:
            num_wanted = self._num_waiting
            for place in self._taken[owner]:
                if not place.has_to_leave:
                    yield place
                num_wanted -= 1
                if not num_wanted:
                    break

    def _size(self, owner: str) -> int:
        return len(self._taken[owner])


class Place:
    """A place, held as long as the block lasts."""

    __slots__ = ("_is_late", "_places", "_task", "has_to_leave", "owner", "since", "turn")

    def __init__(self, places: Places, owner: str) -> None:
        self._places = places
        self._task: asyncio.Task[object] | None = None
        self._is_late = False
        self.has_to_leave = False
        self.owner = owner
        self.since: float | None = None
        """When it was given; None while it is still waiting."""
        self.turn: asyncio.Future[None] | None = None

    def end(self, *, is_late: bool = False) -> None:
        """Makes the block that holds it fail soon."""
        self.has_to_leave, self._is_late = True, is_late
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> None:
        await self._places.take(self)
        if self.has_to_leave:  # before it knew that it had it
            self._places.leave(self)
            raise self._error()
        self._task = asyncio.current_task()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        self._places.leave(self)
        if self.has_to_leave and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._error() from None

    def _error(self) -> ServiceError:
        rules = self._places.rules
        return rules.late() if self._is_late and rules.late is not None else rules.displaced()
