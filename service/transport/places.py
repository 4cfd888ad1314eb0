"""A limited number of places, such as for messages in flight. When all are taken, the oldest holder gives way to a
waiter."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from operator import itemgetter
from types import TracebackType

from penstock.service.errors import Reason, ServiceError

_TURNS = 3
"""Iterations of the event loop between the time at which a holder has to leave and the check whether it still holds its
place, so that input that arrived while the loop was busy is handled first."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The number of places, and how long one may be held."""

    total: int
    each: int
    """Limit on the places of one owner."""
    waiting_each: int
    """Limit on the waiters of one owner. Beyond it, new ones are refused immediately."""
    max_waiting: int
    """Limit on all waiters. Beyond it, the newest waiter of the owner with the most is refused."""
    hold_s: float
    """How long a place may be held while others wait."""
    patience_s: float | None = None
    """How long a place for a message may be held in any case; None is unlimited."""
    spare: int = 0
    """Places beyond ``total`` for owners that have none, so that other owners cannot keep them waiting."""
    message: str = ""
    """The message of the error for holders that had to give way, and for refused waiters, if not the catalogue's."""

    def displaced(self) -> ServiceError:
        """Returns that error."""
        return ServiceError(Reason.MESSAGES_IN_FLIGHT, self.message)


class Places:
    """Keeps track of holders and waiters, by owner. Belongs to the event loop."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._taken: dict[str, dict[HeldPlace, None]] = {}
        self.num_taken = 0
        """Number of places that are held."""
        self._waiting: dict[str, deque[HeldPlace]] = {}
        """Waiters by owner; the first owner is next."""
        self._num_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        """Fires when a holder has to give way."""
        self._late_timer: asyncio.TimerHandle | None = None
        """Fires when a holder's ``patience_s`` may be over. One timer for all is cheaper than one per place."""

    def place(self, owner: str) -> "HeldPlace":
        """Returns a place. Enter it once with ``async with``."""
        return HeldPlace(self, owner)

    def taken(self, owner: str) -> "list[HeldPlace]":
        """Returns an owner's places, oldest first, except those that it is about to leave."""
        return [place for place in self._taken.get(owner, ()) if not place.has_to_leave]

    async def take_place(self, place: "HeldPlace") -> None:
        """Waits for a place. Raises ServiceError."""
        if place.owner not in self._waiting and self._has_room(place.owner):
            self._give(place)
            return
        self._make_room_to_wait(place.owner)
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place.owner, deque()).append(place)
        self._num_waiting += 1
        self._admit()
        try:
            await place.turn
        except asyncio.CancelledError:
            if place.since is None:
                self._stop_waiting(place)
            else:
                self.leave(place)
            raise
        if place.since is None:
            raise self.rules.displaced()

    def leave(self, place: "HeldPlace") -> None:
        mine = self._taken[place.owner]
        del mine[place]
        if not mine:
            del self._taken[place.owner]
        self.num_taken -= 1
        if self._num_waiting:
            self._admit()

    def _has_room(self, owner: str) -> bool:
        num_mine = len(self._taken.get(owner, ()))
        total = self.rules.total + (0 if num_mine else self.rules.spare)
        return self.num_taken < total and num_mine < self.rules.each

    def _make_room_to_wait(self, owner: str) -> None:
        """Refuses another owner's newest waiter if there are too many. Raises ServiceError if this owner has too many,
        or if no other owner has more."""
        num_mine = len(self._waiting.get(owner, ()))
        if num_mine >= self.rules.waiting_each:
            raise self.rules.displaced()
        if self._num_waiting >= self.rules.max_waiting:
            longest = max(self._waiting.values(), key=len)
            if len(longest) <= num_mine:
                raise self.rules.displaced()
            newest = longest[-1]
            self._stop_waiting(newest)
            assert newest.turn is not None
            if not newest.turn.done():  # else it was cancelled
                newest.turn.set_result(None)

    def _stop_waiting(self, place: "HeldPlace") -> None:
        mine = self._waiting.get(place.owner)
        if mine is not None and place in mine:
            mine.remove(place)
            self._num_waiting -= 1
            if not mine:
                del self._waiting[place.owner]

    def _give(self, place: "HeldPlace") -> None:
        loop = asyncio.get_running_loop()
        place.since = loop.time()
        if self._late_timer is None and self.rules.patience_s is not None:
            self._late_timer = loop.call_later(self.rules.patience_s, self._end_late)
        self._taken.setdefault(place.owner, {})[place] = None
        self.num_taken += 1

    def _admit(self) -> None:
        """Gives places to waiters, in turn by owner, and sets the timer that makes holders leave."""
        given = True
        while given:
            given = False
            for owner in list(self._waiting):
                if not self._has_room(owner):
                    continue
                given = True
                waiting = self._waiting.pop(owner)
                place = waiting.popleft()
                self._num_waiting -= 1
                if waiting:
                    self._waiting[owner] = waiting  # behind the others
                self._give(place)
                assert place.turn is not None
                if not place.turn.done():  # else it was cancelled, and leaves in a moment
                    place.turn.set_result(None)
        if self._num_waiting and self._timer is None:
            self._set_timer()

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

    def _oldest(self) -> "Iterator[HeldPlace]":
        """Yields the holders that would give way to waiters. An owner at its limit ``each`` gives way to itself, its
        oldest place first. For other owners, the owner with the most places gives way."""
        num_wanted = 0
        victims: dict[HeldPlace, None] = {}
        for owner, waiting in self._waiting.items():
            mine = self._taken.get(owner, {})
            if len(mine) >= self.rules.each:
                victims.update(dict.fromkeys(islice(mine, len(waiting))))
            else:
                num_wanted += min(len(waiting), self.rules.each - len(mine))
        if num_wanted:
            # Repeatedly the oldest place of the owner with the most: a place's rank is the number of places that its
            # owner would have if all older ones had left. Holders that are about to leave anyway come first.
            ranked = [
                (not place.has_to_leave, -(len(mine) - index), place)
                for mine in self._taken.values()
                for index, place in enumerate(mine)
            ]
            victims.update(dict.fromkeys(place for *_, place in nsmallest(num_wanted, ranked, key=itemgetter(0, 1))))
        return (place for place in victims if not place.has_to_leave)


class HeldPlace:
    """A place that is held inside an ``async with`` block."""

    __slots__ = ("_is_late", "_places", "_task", "has_to_leave", "owner", "since", "turn")

    def __init__(self, places: Places, owner: str) -> None:
        self._places = places
        self._task: asyncio.Task[object] | None = None
        self._is_late = False
        self.has_to_leave = False
        self.owner = owner
        self.since: float | None = None
        """When the place was given; None while the holder waits."""
        self.turn: asyncio.Future[None] | None = None

    def end(self, *, is_late: bool = False) -> None:
        """Makes the block that holds the place fail soon."""
        self.has_to_leave, self._is_late = True, is_late
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> None:
        await self._places.take_place(self)
        if self.has_to_leave:  # ended before the block began
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
        if not self._is_late:
            return rules.displaced()
        text = f"the message did not arrive within {rules.patience_s:g} s; call again when it is ready"
        return ServiceError(Reason.DEADLINE, text)
