"""The store of responses: what it keeps, for how long, and what goes first."""

import random

import pytest
from waiting import ManualClock

from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.stored import response_store
from penstock.clients.gateway.stored.response_store import ResponseStore, StoreFull
from penstock.clients.gateway.stored.stored_response import OVERHEAD_BYTES, Content, StoredResponse
from penstock.clients.gateway.stored.stored_responses import StoredResponses
from penstock.clients.host.parse_turns import ParseTurns

LEAST = OVERHEAD_BYTES + Content().num_bytes
UNIT = 2 * OVERHEAD_BYTES
"""The size of most responses here."""
MAX_BYTES = 40 * UNIT
TTL_S = 100.0


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return ResponseStore(TTL_S, MAX_BYTES, clock)


def response(name, tenant="t", previous="", num_bytes=UNIT, **fields):
    return StoredResponse(name, tenant, previous, "s", b"x" * (num_bytes - LEAST), **fields)


def add(store, *names, **fields):
    for name in names:
        store.add(response(name, **fields))


def found(store, names, tenant="t"):
    return "".join(name for name in names if store.find(name, tenant) is not None)


def written(store):
    """The ids of what a file would have."""
    return {name: change.is_hidden if change else None for name, change in store.take_changes().items()}


def test_only_its_tenant_finds_a_response(store):
    add(store, "a")
    assert found(store, "ab") == "a"
    assert found(store, "ab", "u") == ""


def test_a_response_expires_at_its_time_exactly(store, clock):
    add(store, "a")
    clock.now += 60
    add(store, "b")
    clock.now += 39.999
    assert found(store, "ab") == "ab"
    clock.now = 1100.0
    assert found(store, "ab") == "b"
    assert len(store) == 2  # it is not found, whether it is gone or not
    written(store)
    store.expire()
    assert len(store) == 1
    assert written(store) == {"a": None}


def test_the_time_of_a_live_response_begins_at_its_end(store, clock):
    add(store, "a", is_live=True)
    clock.now += 1000
    store.expire()
    live = store.find("a", "t")
    store.end(live, Content(b"{}", b"{}", b"log"))
    clock.now += 99
    assert store.find("a", "t").content.log == b"log"
    clock.now += 1
    assert store.find("a", "t") is None


def test_the_oldest_go_first_that_have_ended_and_that_none_continues(store):
    add(store, "a", is_live=True)
    add(store, "b")
    add(store, "c", previous="b")
    add(store, *"defghijklmnopqrst")
    assert found(store, "abcdefghijklmnopqrst") == "abcdefghijklmnopqrst"
    add(store, "u")
    assert found(store, "abcdefu") == "abdefu"  # once c has gone, b may go
    add(store, "v")
    assert found(store, "abdefuv") == "adefuv"
    add(store, "w")
    assert found(store, "adefuvw") == "aefuvw"


def test_a_tenant_may_use_half_and_all_of_them_the_whole(store):
    size = 5 * UNIT
    add(store, *"abcd", num_bytes=size, tenant="t")
    add(store, *"efgh", num_bytes=size - UNIT, tenant="u")
    add(store, *"kl", num_bytes=2 * UNIT, tenant="v")
    assert store.num_bytes == MAX_BYTES
    add(store, "i", num_bytes=size, tenant="t")
    assert found(store, "abcdi") == "bcdi"
    add(store, "m", tenant="v")
    assert [found(store, names, tenant) for names, tenant in (("bcdi", "t"), ("efgh", "u"), ("klm", "v"))] == [
        "cdi",  # the largest tenant makes room
        "efgh",
        "klm",
    ]


def test_what_is_larger_than_a_tenants_part_is_refused_and_nothing_goes(store):
    add(store, "a")
    with pytest.raises(StoreFull):
        add(store, "b", num_bytes=MAX_BYTES // 2 + 1)
    assert found(store, "ab") == "a"


def test_live_responses_never_go(store):
    add(store, *"ab", num_bytes=10 * UNIT, is_live=True)
    with pytest.raises(StoreFull):
        add(store, "c")
    assert found(store, "abc") == "ab"


def test_changes_that_are_being_written_stay_as_they_were(store):
    add(store, "a", is_live=True)
    [taken] = store.take_changes().values()
    store.end(store.find("a", "t"), Content(b"{}", b"x"))
    assert (taken.is_live, taken.content) == (True, Content())
    assert store.take_changes()["a"].content == Content(b"{}", b"x")


def test_the_end_of_a_live_response_may_evict_others_but_not_itself(store):
    add(store, "a", is_live=True)
    add(store, *"bc", num_bytes=9 * UNIT)
    live = store.find("a", "t")
    store.end(live, Content(b"{}", b"x" * 4 * UNIT))
    assert found(store, "abc") == "ac"
    assert store.num_bytes == live.num_bytes + 9 * UNIT


def test_an_end_without_room_changes_nothing(store):
    add(store, "a", is_live=True)
    live, before = store.find("a", "t"), store.num_bytes
    with pytest.raises(StoreFull):
        store.end(live, Content(b"{}", b"x" * MAX_BYTES))
    assert (live.is_live, live.content, store.num_bytes) == (True, Content(), before)


async def test_the_error_of_a_response_without_room_needs_no_room():
    stored = StoredResponses(GatewaySettings(max_responses_bytes=4 * UNIT), ParseTurns())
    live = response("a", num_bytes=2 * UNIT, is_live=True)
    live.content = Content(b'{"status":"in_progress","error":null}')
    live.input = live.input[: 2 * UNIT - OVERHEAD_BYTES - live.content.num_bytes]
    await stored.add(live)
    assert stored.size() == 2 * UNIT  # all that a tenant may have
    await stored.end(live, Content(b'{"status":"completed"}', b"x" * UNIT))
    assert (live.is_live, live.content.field("status")) == (False, "failed")
    await stored.add(response("b"))
    assert stored.size() == UNIT


def test_a_large_response_takes_the_place_of_many_without_comparing_all_tenants_for_each(clock, monkeypatch):
    num_reads = 0

    class Counted(response_store._TenantResponses):
        @property
        def num_bytes(self):
            nonlocal num_reads
            num_reads += 1
            return self._num_bytes

        @num_bytes.setter
        def num_bytes(self, value):
            self._num_bytes = value

    monkeypatch.setattr(response_store, "_TenantResponses", Counted)
    store = ResponseStore(TTL_S, 400 * UNIT, clock)
    for number in range(400):
        add(store, str(number), tenant=f"t{number}")
    num_reads = 0
    add(store, "large", tenant="u", num_bytes=200 * UNIT)
    assert len(store) == 201
    assert num_reads < 10 * 400


def test_the_number_is_limited(store, monkeypatch):
    monkeypatch.setattr(response_store, "MAX_PER_TENANT", 3)
    monkeypatch.setattr(response_store, "MAX_IN_ALL", 5)
    add(store, *"abcd")
    assert found(store, "abcd") == "bcd"
    add(store, *"ef", tenant="u")
    add(store, "g", tenant="v")
    assert (len(store), found(store, "bcd")) == (5, "cd")  # those of the tenant with the most bytes


def test_what_is_continued_outlives_its_end_hidden(store):
    add(store, "a", content=Content(b"{secret}", b'{"output":[1]}', b"secret"))
    add(store, "b", previous="a")
    first, second = store.find("a", "t"), store.find("b", "t")
    written(store)
    store.delete(first)
    assert found(store, "ab") == "b"
    assert first.content == Content(output=b'{"output":[1]}')  # only what b continues
    assert written(store) == {"a": True}
    assert [each.id for each in store.conversation(second)] == ["a", "b"]
    store.delete(second)
    assert (len(store), written(store)) == (0, {"a": None, "b": None})


def test_what_is_held_stays_until_it_is_released(store):
    add(store, "a")
    first = store.find("a", "t")
    store.hold(first)
    store.delete(first)
    add(store, "b", previous="a")
    store.release(first)
    assert [each.id for each in store.conversation(store.find("b", "t"))] == ["a", "b"]
    store.delete(store.find("b", "t"))
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_chain_may_be_long(store):
    """Longer than Python's stack."""
    store = ResponseStore(TTL_S, 1 << 30)
    add(store, "0")
    for number in range(1, 4000):
        add(store, str(number), previous=str(number - 1))
    for number in range(3999):
        store.delete(store.find(str(number), "t"))
    assert len(store) == 4000
    store.delete(store.find("3999", "t"))
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_its_numbers_agree_after_any_operations(clock, seed):
    """And a store that is loaded from what was written finds the same."""
    rng = random.Random(seed)
    store = ResponseStore(TTL_S, MAX_BYTES, clock)
    names: list[str] = []
    file: dict[str, StoredResponse | None] = {}
    num_full = 0
    for number in range(400):
        tenant = rng.choice("tu")
        some = [each for name in names if (each := store.find(name, tenant)) is not None]
        live, ended = [[each for each in some if each.is_live is is_live] for is_live in (True, False)]
        previous = rng.choice(ended) if ended and rng.random() < 0.6 else None
        try:
            match rng.choice(["add", "add", "add", "live", "delete", "end", "wait"]):
                case "add" | "live" as kind if kind == "add" or len(live) < 2:
                    add_after(store, previous, str(number), tenant, LEAST + rng.randrange(9000), kind == "live")
                    names.append(str(number))
                case "delete" if some:
                    store.delete(gone := rng.choice(some))
                    assert store.find(gone.id, tenant) is None
                case "end" if live:
                    store.end(live[0], Content(b"{}", b"x" * rng.randrange(9000)))
                case "wait":
                    clock.now += rng.randrange(20)
        except StoreFull:
            num_full += 1  # all that is left is live, or continued
        check(store)
        file |= store.take_changes()
    store.expire()
    file |= store.take_changes()
    assert len(names) > num_full
    loaded = ResponseStore(TTL_S, MAX_BYTES, clock)
    kept = [each for each in file.values() if each is not None]
    for each in kept:
        each.num_users = 0
        if each.is_live:
            each.is_live, each.expires_at = False, clock.now + 1  # as the gateway reads them
    loaded.load(kept)
    check(loaded)
    for tenant in "tu":
        assert found_ids(loaded, names, tenant) == found_ids(store, names, tenant)


def add_after(store, previous, name, tenant, num_bytes, is_live):
    """Adds a response as a request does, which holds what it continues."""
    if previous is not None:
        store.hold(previous)
    try:
        store.add(response(name, tenant, previous.id if previous else "", num_bytes, is_live=is_live))
    finally:
        if previous is not None:
            store.release(previous)


def found_ids(store, names, tenant):
    return [name for name in names if store.find(name, tenant) is not None]


def check(store):
    kept = list(store._by_id.values())
    assert store.num_bytes == sum(each.num_bytes for each in kept) <= MAX_BYTES
    for name, tenant in store._tenants.items():
        assert [each for each in kept if each.tenant == name] == list(tenant.responses.values())
        assert tenant.num_bytes == sum(each.num_bytes for each in tenant.responses.values()) <= MAX_BYTES / 2
    for each in kept:
        assert each.num_users == sum(other.previous_id == each.id for other in kept)
        assert each.num_users or not each.is_hidden
    assert list(store._by_expiry.values()) == sorted(store._by_expiry.values(), key=lambda each: each.expires_at)
    assert set(store._by_expiry) == {each.id for each in kept if not each.is_hidden and not each.is_live}


def test_what_was_stored_longer_than_now_allowed_expires_sooner(clock):
    store = ResponseStore(5.0, MAX_BYTES, clock)
    store.load([response("a", expires_at=clock.now + 1000), response("b", expires_at=clock.now - 1)])
    assert found(store, "ab") == "a"
    assert written(store) == {"a": False, "b": None}
    clock.now += 5
    assert found(store, "a") == ""


def test_what_no_longer_fits_is_not_loaded(clock):
    store = ResponseStore(TTL_S, 4 * UNIT, clock)
    far = clock.now + 50
    store.load([response(name, expires_at=far) for name in "abc"])
    assert found(store, "abc") == "bc"
    assert written(store) == {"a": None}


def test_what_continues_something_that_is_missing_is_not_loaded(clock):
    store = ResponseStore(TTL_S, MAX_BYTES, clock)
    store.load([response("b", previous="a", expires_at=clock.now + 50)])
    assert (len(store), written(store)) == (0, {"b": None})
