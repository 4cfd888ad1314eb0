"""Contexts are kept for their tenant alone, for a while, and within bounds."""

import random
import tracemalloc

import pytest

from penstock.scheduler.request import Context
from penstock.service.requests import contexts as conversations, return_times
from penstock.service.requests.contexts import FULL_TENANTS, ContextStore
from penstock.service.requests.return_times import MAX_TENANTS, NUM_KEPT, NUM_NEEDED, SHORTEST_S, UNKNOWN_S, ReturnTimes


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(clock):
    """Keeps 10 s, and 100 tokens a tenant unless a test says otherwise."""

    def make(ttl_s=10.0, tokens_per_tenant=100):
        return ContextStore(ttl_s, tokens_per_tenant, clock)

    return make


def context(num_tokens, first=0):
    return Context(list(range(first, first + num_tokens)), [bytes([i]) * 32 for i in range(num_tokens // 16)])


def keep(kept, *request_ids, tenant="a", num_tokens=30, wanted=False, continues=""):
    for request_id in request_ids:
        assert kept.keep(request_id, tenant, context(num_tokens), wanted=wanted, continues=continues)


def held(kept, *request_ids, tenant="a"):
    return [request_id for request_id in request_ids if kept.find(request_id, tenant)]


def test_what_is_kept_is_what_comes_back(make):
    kept = make()
    keep(kept, "x", num_tokens=40)
    assert kept.find("x", "a").unpacked() == context(40)


def test_another_tenants_is_not_there(make):
    kept = make()
    keep(kept, "x")
    assert kept.find("x", "b") is None
    assert kept.find("nothing", "b") is None
    assert kept.find("x", "a") is not None


def test_after_its_time_it_is_gone_used_or_not(make, clock):
    kept = make()
    keep(kept, "x")
    clock.now += 6
    keep(kept, "y")
    assert held(kept, "x", "y") == ["x", "y"]
    clock.now += 4
    assert held(kept, "x", "y") == ["y"]
    assert (len(kept), kept.num_tokens) == (1, 30)


def test_the_least_recently_used_goes_first(make):
    kept = make()
    keep(kept, "x", "y", "z")
    assert held(kept, "x")
    keep(kept, "new")
    assert held(kept, "x", "y", "z", "new") == ["x", "z", "new"]
    assert kept.num_tokens == 90


def test_unrequested_contexts_are_evicted_before_requested_ones(make):
    kept = make()
    keep(kept, "wanted", wanted=True)
    keep(kept, *map(str, range(50)))
    assert held(kept, "wanted", "47", "48", "49") == ["wanted", "48", "49"]


def test_a_turn_takes_the_place_of_the_one_before(make):
    """A conversation that goes on must not push out others with its own past."""
    kept = make()
    keep(kept, "other", wanted=True)
    keep(kept, "turn 0", wanted=True)
    for turn in range(1, 20):
        keep(kept, f"turn {turn}", wanted=True, continues=f"turn {turn - 1}")
    assert held(kept, "other", "turn 17", "turn 18", "turn 19") == ["other", "turn 18", "turn 19"]


def test_who_continues_what_is_gone_or_anothers_changes_nothing(make):
    kept = make()
    keep(kept, "x", wanted=True)
    keep(kept, "y", continues="gone")
    keep(kept, "z", tenant="b", continues="x")
    keep(kept, "new 1", "new 2", wanted=True)
    assert held(kept, "x", "y", "new 1", "new 2") == ["x", "new 1", "new 2"]


def test_one_tenant_takes_nothing_from_another(make):
    kept = make()
    keep(kept, "mine", tenant="quiet")
    keep(kept, *map(str, range(1000)))
    assert held(kept, "mine", tenant="quiet") == ["mine"]


def test_all_tenants_together_are_bounded_and_the_quietest_gives_way(make):
    kept = make()
    tenants = [f"tenant {index}" for index in range(FULL_TENANTS + 1)]
    for tenant in tenants[:-1]:
        keep(kept, tenant, tenant=tenant, num_tokens=100)
    assert held(kept, tenants[0], tenant=tenants[0])
    keep(kept, tenants[-1], tenant=tenants[-1], num_tokens=100)
    assert [tenant for tenant in tenants if not held(kept, tenant, tenant=tenant)] == [tenants[1]]
    assert kept.num_tokens == FULL_TENANTS * 100


def test_entries_are_bounded_too(make, monkeypatch):
    monkeypatch.setattr(conversations, "MAX_PER_TENANT", 5)
    monkeypatch.setattr(conversations, "MAX_IN_ALL", 12)
    kept = make()
    for tenant in ("a", "b", "c"):
        keep(kept, *(f"{tenant}{index}" for index in range(6)), tenant=tenant, num_tokens=1)
    assert len(kept) == 12
    assert held(kept, *(f"a{index}" for index in range(6))) == ["a4", "a5"]


@pytest.mark.parametrize("settings", [{"ttl_s": 0}, {"tokens_per_tenant": 0}, {"tokens_per_tenant": 29}])
def test_what_has_no_room_is_not_kept(make, settings):
    kept = make(**settings)
    assert not kept.keep("x", "a", context(30), wanted=True)
    assert kept.find("x", "a") is None
    assert not len(kept)


def test_a_context_is_6_bytes_a_token(make):
    kept = make(tokens_per_tenant=1_000_000)
    whole = Context(list(range(100_000, 200_000)), [bytes(32)] * 6250)
    tracemalloc.start()
    try:
        assert kept.keep("x", "a", whole, wanted=False)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 6.1 * 100_000


def test_books_balance_whatever_happens(make, clock):
    chance = random.Random(1)
    kept = make(ttl_s=5.0, tokens_per_tenant=200)
    for index in range(3000):
        tenant = f"tenant {chance.randrange(30)}"
        keep(
            kept,
            str(index),
            tenant=tenant,
            num_tokens=chance.randrange(1, 90),
            wanted=chance.random() < 0.5,
            continues=str(chance.randrange(index + 1)),
        )
        kept.find(str(chance.randrange(index + 1)), tenant)
        clock.now += chance.random() * 0.02
        tenants = kept._tenants
        assert kept.num_tokens == sum(one.num_tokens for one in tenants.values()) <= FULL_TENANTS * 200
        assert len(kept) == sum(len(one) for one in tenants.values())
        assert all(len(one) and one.num_tokens <= 200 for one in tenants.values())
    clock.now += 10
    kept.find("x", "a")
    assert not kept._tenants
    assert kept.num_tokens == 0


def test_return_times_decide_how_long_kv_is_retained():
    now = [0.0]
    contexts = ContextStore(600.0, 10_000, clock=lambda: now[0])
    assert contexts.return_times.retain_s("a") == UNKNOWN_S
    for number in range(NUM_NEEDED):
        contexts.keep(str(number), "a", Context([1, 2], []), wanted=True)
        now[0] += 3.0
        assert contexts.find(str(number), "a") is not None
        now[0] += 50.0
        assert contexts.find(str(number), "a") is not None  # only the first return counts
    assert contexts.return_times.retain_s("a") == 6.0
    assert contexts.return_times.retain_s("b") == UNKNOWN_S


def test_a_session_has_return_times_of_its_own_once_it_has_enough():
    now = [0.0]
    times = ReturnTimes(lambda: now[0])

    def turns(session, seconds, number, counts_for_tenant=True):
        for _ in range(number):
            times.ended("a", session)
            now[0] += seconds
            times.began("a", session, counts_for_tenant=counts_for_tenant)
            times.began("a", session, counts_for_tenant=counts_for_tenant)  # only the first return counts
        times.ended("a", session)

    turns("slow", 30.0, NUM_NEEDED - 1)
    assert times.retain_s("a", "slow") == times.retain_s("a") == UNKNOWN_S
    turns("slow", 30.0, 1)
    assert times.retain_s("a", "slow") == 60.0
    turns("fast", 2.0, NUM_NEEDED, counts_for_tenant=False)
    assert times.retain_s("a", "fast") == 4.0
    assert times.retain_s("a", "new") == times.retain_s("a") == 60.0, "by the tenant's other sessions"
    assert times.retain_s("b", "fast") == UNKNOWN_S, "a session is its tenant's"


def test_the_sessions_of_which_times_are_kept_are_limited(monkeypatch):
    monkeypatch.setattr(return_times, "MAX_SESSIONS", 3)
    times = ReturnTimes()
    for number in range(9):
        times.ended("a", str(number))
    assert len(times._ended) == 3
    for number in range(9):
        times.ended("a", str(number))
        times.began("a", str(number), counts_for_tenant=False)
    assert len(times._by_session) == 3
    assert not times._ended, "all were continued"


def test_return_times_of_the_last_returns_and_tenants_only():
    times = ReturnTimes()
    for _ in range(NUM_KEPT):
        times.add_return("a", 100.0)
    for _ in range(NUM_KEPT):
        times.add_return("a", 0.1)
    assert times.retain_s("a") == SHORTEST_S
    for number in range(MAX_TENANTS):
        times.add_return(str(number), 1.0)
    assert times.retain_s("a") == UNKNOWN_S
