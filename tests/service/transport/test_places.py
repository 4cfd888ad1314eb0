"""Places: whoever has had one the longest gives way to whoever waits."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from penstock.service.errors import Reason, ServiceError
from penstock.service.transport.places import Places, Rules

RULES = Rules(total=3, each=2, waiting_each=8, max_waiting=8, hold_s=0.0)


class Holder:
    """Has a place until it is told to leave."""

    def __init__(self, places: Places, owner: str) -> None:
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(places, owner))

    async def _run(self, places: Places, owner: str) -> None:
        async with places.place(owner):
            self.entered.set()
            await self.leave.wait()

    async def reason(self) -> Reason:
        with pytest.raises(ServiceError) as error:
            await self.task
        return error.value.reason


async def holders(places: Places, *owners: str) -> list[Holder]:
    """They enter, in this order."""
    found = []
    for owner in owners:
        found.append(Holder(places, owner))
        await found[-1].entered.wait()
    return found


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_oldest_of_an_owner_with_all_its_places_gives_way():
    places = Places(RULES)
    other, first, second = await holders(places, "b", "a", "a")
    third = Holder(places, "a")
    assert await first.reason() is Reason.MESSAGES_IN_FLIGHT
    await third.entered.wait()
    assert not second.task.done()
    assert not other.task.done()
    assert places.num_taken == 3


async def test_the_largest_owners_oldest_place_goes_to_another_owner():
    places = Places(RULES)
    other, first, second = await holders(places, "b", "a", "a")
    new = Holder(places, "c")
    assert await first.reason() is Reason.MESSAGES_IN_FLIGHT
    await new.entered.wait()
    assert not second.task.done()
    assert not other.task.done()


async def test_holders_keep_their_places_while_none_waits():
    places = Places(RULES)
    everybody = await holders(places, "a", "a", "b")
    await settle()
    for holder in everybody:
        holder.leave.set()
        await holder.task
    assert places.num_taken == 0


async def test_nobody_gives_way_too_soon():
    """And whoever leaves lets the next one in."""
    places = Places(replace(RULES, hold_s=3600.0))
    first, _ = await holders(places, "a", "a")
    third = Holder(places, "a")
    await settle()
    assert not third.entered.is_set()
    first.leave.set()
    await third.entered.wait()


async def test_as_many_give_way_as_wait():
    places = Places(replace(RULES, total=8, each=4))
    mine = await holders(places, "a", "a", "a", "a")
    new = [Holder(places, "a") for _ in range(3)]
    for holder in new:
        await holder.entered.wait()
    assert [holder.task.done() for holder in mine] == [True, True, True, False]
    for holder in mine[:3]:
        assert await holder.reason() is Reason.MESSAGES_IN_FLIGHT


async def test_owners_who_wait_take_turns():
    places = Places(replace(RULES, total=1, each=1, hold_s=3600.0))
    (first,) = await holders(places, "x")
    waiting = [Holder(places, owner) for owner in "aaab"]
    await settle()
    order: list[int] = []
    for _ in waiting:
        (first.leave if not order else waiting[order[-1]].leave).set()
        await settle()
        order.append(next(i for i, holder in enumerate(waiting) if holder.entered.is_set() and i not in order))
    assert order == [0, 3, 1, 2]


async def test_more_than_may_wait_are_refused():
    places = Places(replace(RULES, waiting_each=1, hold_s=3600.0))
    await holders(places, "a", "a")
    Holder(places, "a")
    await settle()
    assert await Holder(places, "a").reason() is Reason.MESSAGES_IN_FLIGHT


async def test_a_place_times_out_even_if_none_waits_for_it():
    places = Places(replace(RULES, patience_s=0.0))
    (holder,) = await holders(places, "a")
    assert await holder.reason() is Reason.DEADLINE
    assert places.num_taken == 0


@pytest.mark.parametrize("is_given", [False, True])
async def test_whoever_is_cancelled_leaves_nothing_behind(is_given):
    """While it waits, and at the moment at which it was given a place."""
    places = Places(replace(RULES, hold_s=3600.0))
    first, _ = await holders(places, "a", "a")
    waiting = Holder(places, "a")
    await settle()
    if is_given:
        first.leave.set()
        await first.task
        assert places.num_taken == 2  # it has the place, and does not know it yet
    waiting.task.cancel()
    with suppress(asyncio.CancelledError):
        await waiting.task
    assert places.num_taken == (1 if is_given else 2)
    if not is_given:
        first.leave.set()
    await Holder(places, "a").entered.wait()


async def test_one_owner_cannot_refuse_another_by_waiting():
    """Its own next one is refused; another owner's gets the place that is free, or waits."""
    places = Places(replace(RULES, total=4, waiting_each=2, hold_s=3600.0))
    await holders(places, "a", "a")
    waiting = [Holder(places, "a") for _ in range(2)]
    await settle()
    assert await Holder(places, "a").reason() is Reason.MESSAGES_IN_FLIGHT
    await holders(places, "b", "b")
    c = Holder(places, "c")
    await settle()
    assert not c.task.done()
    assert not any(holder.task.done() for holder in waiting)


async def test_the_newest_of_the_longest_queue_makes_room_to_wait():
    places = Places(replace(RULES, max_waiting=3, hold_s=3600.0))
    await holders(places, "a", "a", "b")
    waiting = [Holder(places, "a") for _ in range(3)]
    await settle()
    first = Holder(places, "c")
    assert await waiting[2].reason() is Reason.MESSAGES_IN_FLIGHT
    second = Holder(places, "d")
    assert await waiting[1].reason() is Reason.MESSAGES_IN_FLIGHT
    assert await Holder(places, "a").reason() is Reason.MESSAGES_IN_FLIGHT  # as many as any
    await settle()
    assert not any(holder.task.done() for holder in (waiting[0], first, second))


async def test_an_owner_without_a_place_need_not_wait_for_others():
    places = Places(replace(RULES, spare=1, hold_s=3600.0))
    await holders(places, "a", "a", "b", "c")
    for owner in ("c", "d"):
        waiting = Holder(places, owner)
        await settle()
        assert not waiting.entered.is_set()


async def test_no_more_give_way_than_are_wanted_of_them():
    """Five wait for places of their own owner, and one for another's."""
    places = Places(replace(RULES, total=8, each=4, hold_s=3600.0))
    await holders(places, "b", "b", "b", "b", "a", "a", "a", "a")
    for owner in "aaac":
        Holder(places, owner)
    await settle()
    assert [place.owner for place in places._oldest()] == ["a", "a", "a", "b"]


async def test_those_with_the_most_give_way_in_turn():
    places = Places(replace(RULES, total=8, each=4, hold_s=3600.0))
    await holders(places, "a", "a", "a", "a", "b", "b", "b", "b")
    for _ in range(4):
        Holder(places, "c")
    await settle()
    assert sorted(place.owner for place in places._oldest()) == ["a", "a", "b", "b"]
