"""The slots of adapters: who gets one, who gives one up, and when."""

import pytest

from penstock.scheduler.adapters import Adapter, AdapterSlots


@pytest.fixture
def loads():
    return []


@pytest.fixture
def slots(loads):
    slots = AdapterSlots(2)
    slots.start_load = lambda adapter, slot: loads.append((adapter.name, slot))
    return slots


def adapters(number):
    return [Adapter(name, f"/{name}") for name in "abcdefg"[:number]]


def begin(slots, adapter):
    """Loads it, and begins a row with it."""
    assert not slots.is_ready(adapter)
    slots.end_load(adapter, adapter.slot, is_loaded=True)
    assert slots.is_ready(adapter)
    adapter.num_rows += 1


def test_an_adapter_is_ready_once_it_is_loaded(slots, loads):
    [a] = adapters(1)
    assert not slots.is_ready(a)
    assert not slots.is_ready(a), "one load is enough"
    assert loads == [("a", 1)]
    slots.end_load(a, 1, is_loaded=True)
    assert slots.is_ready(a)


def test_the_least_recently_used_one_without_rows_gives_its_slot_up(slots, loads):
    a, b, c = adapters(3)
    for adapter in (a, b):
        begin(slots, adapter)
    a.end_row(step=3)
    b.end_row(step=2)
    slots.answered = 3
    assert not slots.is_ready(c)
    assert loads[-1] == ("c", 2)
    assert (a.slot, b.slot, c.slot) == (1, 0, 2)


def test_a_slot_is_in_use_until_the_last_step_with_it_has_a_result(slots, loads):
    a, b, c = adapters(3)
    for adapter in (a, b):
        begin(slots, adapter)
    a.end_row(step=5)
    slots.answered = 4
    assert not slots.is_ready(c)
    assert len(loads) == 2
    slots.answered = 5
    assert not slots.is_ready(c)
    assert loads[-1] == ("c", 1)


def test_an_adapter_whose_slot_another_one_wants_begins_no_rows(slots, loads):
    """Otherwise a stream of requests for it would keep the other one out for ever."""
    a, b, c = adapters(3)
    for adapter in (a, b):
        begin(slots, adapter)
    assert not slots.is_ready(c)
    assert not slots.is_ready(a), "the least recently used one"
    assert slots.is_ready(b)
    a.end_row(step=1)
    slots.answered = 1
    assert not slots.is_ready(c)
    assert loads[-1] == ("c", 1)
    slots.end_load(c, 1, is_loaded=True)
    assert slots.is_ready(c)


def test_it_begins_rows_again_if_nobody_took_its_slot(slots):
    a, b, c = adapters(3)
    for adapter in (a, b):
        begin(slots, adapter)
    assert not slots.is_ready(c)  # and its request is cancelled
    a.end_row(step=1)
    slots.answered = 1
    assert slots.is_ready(a)


def test_a_load_that_failed_leaves_the_slot_empty(slots, loads):
    a, b = adapters(2)
    assert not slots.is_ready(a)
    slots.end_load(a, 1, is_loaded=False)
    assert a.slot == 0
    assert not slots.is_ready(b)
    assert loads[-1] == ("b", 1)


def test_the_end_of_a_load_for_a_worker_that_is_gone_changes_nothing(slots, loads):
    a, b = adapters(2)
    assert not slots.is_ready(a)
    slots.reset()
    assert not slots.is_ready(b)
    slots.end_load(a, 1, is_loaded=True)
    assert (a.slot, b.slot) == (0, 1)
    assert not slots.is_ready(b)


def test_free_slots_are_for_operators_too(slots):
    a, b, c = adapters(3)
    assert [slots.take_free(adapter) for adapter in (a, b, c)] == [1, 2, 0]
    for adapter in (a, b):
        slots.end_load(adapter, adapter.slot, is_loaded=True)
    slots.retire(a)
    assert a.slot == 0
    b.num_rows = 1
    slots.retire(b)
    assert b.slot == 2, "its rows need it"
