"""Memory for bodies: what is refused, and which body gives way."""

import asyncio
from contextlib import ExitStack

import pytest

from penstock.clients.gateway.upstream.body_budget import BURST_BYTES, TENANT_BYTES_PER_S, BodyBudget, NoRoomForBody


@pytest.fixture
def budget():
    return BodyBudget(100, interval_s=0.0)


class Arriving:
    """Makes bodies that still arrive."""

    def __init__(self, budget, stack):
        self._budget = budget
        self._stack = stack
        self.evicted: list[str] = []

    async def __call__(self, name, tenant, num_bytes):
        body = self._stack.enter_context(self._budget.body(tenant))
        body.evict = lambda: self.evicted.append(name)
        await body.add_bytes(num_bytes)
        return body


@pytest.fixture
def arriving(budget):
    with ExitStack() as stack:
        yield Arriving(budget, stack)
    assert budget.num_bytes == 0


async def test_bytes_are_counted_until_a_body_is_dropped(budget):
    with budget.body("a") as body:
        await body.add_bytes(20)
        await body.add_bytes(10)
        assert budget.num_bytes == 30
    assert budget.num_bytes == 0


async def test_what_is_needed_no_more_of_a_body_is_room_for_others(budget, arriving):
    whole = await arriving("whole", "a", 50)
    whole.evict = None
    whole.shrink_to(20)
    assert budget.num_bytes == 20
    whole.shrink_to(30)
    assert budget.num_bytes == 20
    await arriving("next", "a", 30)
    assert arriving.evicted == []


async def test_a_tenant_over_its_half_loses_the_body_that_has_arrived_for_longest(budget, arriving):
    await arriving("first", "a", 20)
    await arriving("second", "a", 20)
    await arriving("other", "b", 20)
    await arriving("third", "a", 20)
    assert arriving.evicted == ["first"]
    assert budget.num_bytes == 60


async def test_a_body_that_is_the_slowest_itself_has_no_room(arriving):
    with pytest.raises(NoRoomForBody) as raised:
        await arriving("only", "a", 51)
    assert raised.value.is_tenants
    assert arriving.evicted == []


async def test_bodies_that_are_whole_do_not_give_way(budget, arriving):
    whole = await arriving("whole", "a", 50)
    whole.evict = None
    with pytest.raises(NoRoomForBody) as raised:
        await arriving("next", "a", 1)
    assert raised.value.is_tenants


async def test_the_tenant_that_holds_the_most_gives_way_to_others(budget, arriving):
    for number in range(5):
        await arriving(f"a{number}", "a", 10)
    for number in range(3):
        await arriving(f"b{number}", "b", 10)
    for number in range(3):
        await arriving(f"c{number}", "c", 10)
    assert arriving.evicted == ["a0"]
    assert budget.num_bytes == 100


async def test_a_new_body_is_refused_for_total_space_if_none_yields(budget, arriving):
    for tenant in "ab":
        (await arriving(tenant, tenant, 50)).evict = None
    with pytest.raises(NoRoomForBody) as raised:
        await arriving("c", "c", 1)
    assert not raised.value.is_tenants


async def test_what_was_evicted_is_counted_no_more(budget, arriving):
    first = await arriving("first", "a", 30)
    await arriving("second", "a", 30)
    assert (budget.num_bytes, arriving.evicted) == (30, ["first"])
    await first.add_bytes(5)  # it had just come
    assert budget.num_bytes == 30


async def test_evictions_keep_their_distance():
    """Else their sender could send bodies as fast as the network allows, each at the cost of another one."""
    now = 1.0
    budget = BodyBudget(100, interval_s=5.0, clock=lambda: now)
    with ExitStack() as stack:
        arriving = Arriving(budget, stack)
        for name in ("first", "second"):
            await arriving(name, "a", 40)
        assert arriving.evicted == ["first"]
        third = asyncio.create_task(arriving("third", "a", 40))
        await arriving("other", "b", 40)
        await asyncio.sleep(0.01)
        assert not third.done()
        now = 6.0
        budget._wake("a")
        await third
        assert arriving.evicted == ["first", "second"]


@pytest.mark.parametrize("ends", ["dropped", "shrunk"])
async def test_a_body_that_waits_goes_on_as_soon_as_there_is_room(ends):
    budget = BodyBudget(100, interval_s=1000.0)
    with ExitStack() as stack, ExitStack() as first_one:
        first = first_one.enter_context(budget.body("a"))
        await first.add_bytes(40)
        budget._next_eviction["a"] = float("inf")
        arriving = Arriving(budget, stack)
        waiting = [asyncio.create_task(arriving(name, "a", 20)) for name in ("second", "third")]
        await asyncio.sleep(0.01)
        assert [each.done() for each in waiting] == [False, False]
        if ends == "dropped":
            first_one.close()
        else:
            first.shrink_to(0)
        await asyncio.gather(*waiting)
        assert arriving.evicted == []


async def test_a_body_that_is_cancelled_while_it_waits_counts_no_more():
    budget = BodyBudget(100, interval_s=1000.0)
    with budget.body("a") as first:
        await first.add_bytes(50)
        budget._next_eviction["a"] = float("inf")

        async def arrive():
            with budget.body("a") as body:
                body.evict = lambda: None
                await body.add_bytes(10)

        waiting = asyncio.create_task(arrive())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert budget.num_bytes == 50


class Waits:
    """A clock that sleeping moves."""

    def __init__(self):
        self.now = 1000.0
        self.waited_s = 0.0

    async def sleep(self, seconds):
        self.now += seconds
        self.waited_s += seconds


async def test_a_tenants_bodies_are_received_at_a_rate(monkeypatch):
    waits = Waits()
    monkeypatch.setattr(asyncio, "sleep", waits.sleep)
    budget = BodyBudget(1 << 40, clock=lambda: waits.now)
    with budget.body("a") as first, budget.body("a") as second, budget.body("b") as other:
        await first.add_bytes(BURST_BYTES)
        assert waits.waited_s == 0.0, "a burst is received at once"
        for _ in range(64):
            await first.add_bytes(TENANT_BYTES_PER_S // 64)
            await second.add_bytes(TENANT_BYTES_PER_S // 64)
        assert waits.waited_s == pytest.approx(2.0, rel=0.01), "its bodies share the rate"
        waits.waited_s = 0.0
        await other.add_bytes(BURST_BYTES)
        assert waits.waited_s == 0.0, "other tenants have their own"
        waits.now += 60.0
        await first.add_bytes(2 * BURST_BYTES)
        assert waits.waited_s == pytest.approx(BURST_BYTES / TENANT_BYTES_PER_S), "nothing is saved beyond a burst"
