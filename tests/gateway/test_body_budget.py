"""Memory for bodies: what is refused, and which body gives way."""

from contextlib import ExitStack

import pytest

from penstock.clients.gateway.body_budget import BodyBudget, NoRoomForBody


@pytest.fixture
def budget():
    return BodyBudget(100)


class Arriving:
    """Makes bodies that still arrive."""

    def __init__(self, budget, stack):
        self._budget = budget
        self._stack = stack
        self.evicted: list[str] = []

    def __call__(self, name, tenant, num_bytes):
        body = self._stack.enter_context(self._budget.body(tenant))
        body.evict = lambda: self.evicted.append(name)
        body.add(num_bytes)
        return body


@pytest.fixture
def arriving(budget):
    with ExitStack() as stack:
        yield Arriving(budget, stack)
    assert budget.num_bytes == 0


def test_bytes_are_counted_until_a_body_is_dropped(budget):
    with budget.body("a") as body:
        body.add(20)
        body.add(10)
        assert budget.num_bytes == 30
    assert budget.num_bytes == 0


def test_what_is_needed_no_more_of_a_body_is_room_for_others(budget, arriving):
    whole = arriving("whole", "a", 50)
    whole.evict = None
    whole.shrink_to(20)
    assert budget.num_bytes == 20
    whole.shrink_to(30)
    assert budget.num_bytes == 20
    arriving("next", "a", 30)
    assert arriving.evicted == []


def test_a_tenant_over_its_half_loses_the_body_that_has_arrived_for_longest(budget, arriving):
    arriving("first", "a", 20)
    arriving("second", "a", 20)
    arriving("other", "b", 20)
    arriving("third", "a", 20)
    assert arriving.evicted == ["first"]
    assert budget.num_bytes == 60


def test_a_body_that_is_the_slowest_itself_has_no_room(arriving):
    with pytest.raises(NoRoomForBody) as raised:
        arriving("only", "a", 51)
    assert raised.value.is_tenants
    assert arriving.evicted == []


def test_bodies_that_are_whole_do_not_give_way(budget, arriving):
    whole = arriving("whole", "a", 50)
    whole.evict = None
    with pytest.raises(NoRoomForBody) as raised:
        arriving("next", "a", 1)
    assert raised.value.is_tenants


def test_the_tenant_that_holds_the_most_gives_way_to_others(budget, arriving):
    for number in range(5):
        arriving(f"a{number}", "a", 10)
    for number in range(3):
        arriving(f"b{number}", "b", 10)
    for number in range(3):
        arriving(f"c{number}", "c", 10)
    assert arriving.evicted == ["a0"]
    assert budget.num_bytes == 100


def test_where_nobody_can_give_way_the_new_body_is_refused_for_all_bodies_sake(budget, arriving):
    for tenant in "ab":
        arriving(tenant, tenant, 50).evict = None
    with pytest.raises(NoRoomForBody) as raised:
        arriving("c", "c", 1)
    assert not raised.value.is_tenants


def test_what_was_evicted_is_counted_no_more(budget, arriving):
    first = arriving("first", "a", 30)
    arriving("second", "a", 30)
    assert (budget.num_bytes, arriving.evicted) == (30, ["first"])
    first.add(5)  # it had just come
    assert budget.num_bytes == 30
