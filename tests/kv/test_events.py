"""What a reader of the log is told makes its mirror equal to the prefix map, whenever and however much it reads."""

import random
from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from penstock.kv.events import BlockOrigin, KvChanges, KvEventLog, KvEventReader
from penstock.kv.manager import MIN_EVENTS_KEPT, KVCacheManager

ENDLESS = 1 << 30
HASHES = [bytes([number]) * 32 for number in range(6)]


@pytest.fixture
def log():
    return KvEventLog(block_size=2, max_changes=4)


def store(log, *numbers):
    for number in numbers:
        log.stored(HASHES[number], HASHES[number - 1] if number else b"", (number, number + 1))


def stored_numbers(changes):
    return [HASHES.index(block.block_hash) for block in changes.stored]


def test_a_new_reader_gets_everything_and_then_only_changes(log):
    store(log, 0, 1)
    reader = KvEventReader(log)
    assert not reader.is_up_to_date
    first = reader.read(ENDLESS)
    assert (first.cleared, first.removed, stored_numbers(first)) == (True, [], [0, 1])
    assert first.stored[1] == (HASHES[1], HASHES[0], (1, 2), "", "")
    assert first.stored[0].parent_hash == b""
    assert reader.is_up_to_date
    assert not reader.read(ENDLESS).cleared
    store(log, 2)
    log.removed(HASHES[0])
    assert not reader.is_up_to_date
    second = reader.read(ENDLESS)
    assert (second.cleared, second.removed, stored_numbers(second)) == (False, HASHES[:1], [2])
    assert second.sequence == first.sequence + 2


def test_the_name_of_an_adapter_is_reported_and_counts_towards_the_size(log):
    for number in range(3):
        parent = HASHES[number - 1] if number else b""
        log.stored(HASHES[number], parent, (number, number + 1), BlockOrigin("acme", adapter="a" * 256))
    reader = KvEventReader(log)
    for number in range(3):
        [block] = reader.read(max_bytes=300).stored
        assert (block.block_hash, block.tenant, block.adapter) == (HASHES[number], "acme", "a" * 256)


def test_an_empty_cache_is_reported_too(log):
    first = KvEventReader(log).read(ENDLESS)
    assert first == KvChanges(log.sequence, cleared=True, removed=[], stored=[])
    assert first.sequence > 0


def test_what_is_stored_and_removed_between_two_messages_is_not_there(log):
    reader = KvEventReader(log)
    reader.read(ENDLESS)
    store(log, 0)
    log.removed(HASHES[0])
    changes = reader.read(ENDLESS)
    assert (changes.removed, changes.stored) == (HASHES[:1], [])
    store(log, 0)
    log.removed(HASHES[0])
    store(log, 0)
    changes = reader.read(ENDLESS)
    assert (changes.removed, stored_numbers(changes)) == ([], [0])


def test_a_reader_goes_on_where_another_left(log):
    reader = KvEventReader(log)
    store(log, 0)
    sequence = reader.read(ENDLESS).sequence
    store(log, 1)
    changes = KvEventReader(log, log.stream_id, sequence).read(ENDLESS)
    assert (changes.cleared, stored_numbers(changes)) == (False, [1])
    nothing = KvEventReader(log, log.stream_id, log.sequence).read(ENDLESS)
    assert nothing == KvChanges(log.sequence, cleared=False, removed=[], stored=[])


@pytest.mark.parametrize("place", ["another log's", "to come", "of nothing", "too long ago"])
def test_a_place_that_the_log_does_not_know_begins_anew(log, place):
    store(log, 0, 1, 2, 3, 4)
    stream_id, sequence = {
        "another log's": ("", log.sequence),
        "to come": (log.stream_id, log.sequence + 1),
        "of nothing": (log.stream_id, 0),
        "too long ago": (log.stream_id, log.sequence - 5),
    }[place]
    changes = KvEventReader(log, stream_id, sequence).read(ENDLESS)
    assert (changes.cleared, stored_numbers(changes)) == (True, [0, 1, 2, 3, 4])


def test_two_logs_have_two_names(log):
    assert log.stream_id != KvEventLog(block_size=2, max_changes=4).stream_id


def test_messages_are_bounded_and_only_the_last_may_be_gone_on_from(log):
    store(log, 0, 1, 2)
    reader = KvEventReader(log)
    parts = [reader.read(1) for _ in range(3)]
    assert [stored_numbers(part) for part in parts] == [[0], [1], [2]]
    assert [part.cleared for part in parts] == [True, False, False]
    assert [part.sequence for part in parts] == [0, 0, log.sequence]
    store(log, 3, 4)
    assert reader.read(1).sequence == parts[2].sequence
    # Whoever is cut off here is told again what it may have missed.
    again = KvEventReader(log, log.stream_id, parts[2].sequence).read(ENDLESS)
    assert (again.cleared, stored_numbers(again)) == (False, [3, 4])


def test_a_reader_that_falls_behind_begins_anew_within_a_snapshot_as_well(log):
    store(log, 0, 1, 2)
    readers = [KvEventReader(log), KvEventReader(log)]
    readers[0].read(1)
    readers[1].read(ENDLESS)
    for _ in range(3):
        log.removed(HASHES[2])
        store(log, 2)
    for reader in readers:
        first = reader.read(1)
        assert (first.cleared, first.sequence) == (True, 0)
        rest = reader.read(ENDLESS)
        assert (rest.cleared, rest.sequence) == (False, log.sequence)
        assert sorted(stored_numbers(first) + stored_numbers(rest)) == [0, 1, 2]


def test_a_reader_faster_than_the_cache_changes_catches_up():
    """The log knows as many changes as there are blocks; two changes come with every three that are told, or more."""
    log = KvEventLog(block_size=2, max_changes=60)
    known = deque(number.to_bytes(32) for number in range(60))
    for block_hash in known:
        log.stored(block_hash, b"", (1, 2))
    reader = KvEventReader(log)
    num_cleared = 0
    for number in range(60, 200):
        changes = reader.read(200)
        num_cleared += changes.cleared
        if reader.is_up_to_date:
            break
        log.removed(known.popleft())
        known.append(number.to_bytes(32))
        log.stored(known[-1], b"", (1, 2))
    assert reader.is_up_to_date
    assert num_cleared == 1


def test_a_cleared_cache_is_reported_at_once_despite_pending_changes(log):
    store(log, 0, 1, 2)
    reader = KvEventReader(log)
    reader.read(1)
    log.cleared(but=HASHES[1:2])
    changes = reader.read(ENDLESS)
    assert (changes.cleared, changes.removed, stored_numbers(changes)) == (True, [], [1])


def test_a_reader_is_woken_once(log):
    calls = []
    log.wake_once(lambda: calls.append("changed"))
    store(log, 0)
    store(log, 1)
    assert calls == ["changed"]
    for change in (lambda: log.removed(HASHES[0]), log.cleared):
        log.wake_once(lambda: calls.append("changed"))
        change()
    assert len(calls) == 3

    def forgotten():
        calls.append("forgotten")

    log.wake_once(forgotten)
    log.forget_wake(forgotten)
    log.forget_wake(forgotten)
    store(log, 2)
    assert len(calls) == 3


def test_nothing_is_reported_without_a_prefix_cache():
    kv = KVCacheManager(8, 4, caches_prefixes=False)
    before = kv.events.sequence
    table = kv.allocate([], 16) or []
    kv.publish(table, [], 0, 4, range(16))
    kv.pool.retain([], until=10.0, owner="tenant")
    kv.pool.release(table)
    assert kv.events.sequence == before
    assert list(kv.events.hashes) == []


def test_a_chain_that_was_stored_backwards_comes_in_order_and_in_bounded_messages():
    log = KvEventLog(block_size=2, max_changes=5000)
    reader = KvEventReader(log, log.stream_id, log.sequence)
    hashes = [number.to_bytes(32) for number in range(1, 2001)]
    for number in reversed(range(2000)):
        log.stored(hashes[number], hashes[number - 1] if number else b"", (1, 2))
    messages = []
    while not reader.is_up_to_date:
        messages.append([block.block_hash for block in reader.read(8000).stored])
    assert max(map(len, messages)) < 110
    assert [block_hash for message in messages for block_hash in message] == hashes
    num_blocks, blocks = log.snapshot()
    assert num_blocks == 2000
    assert [block.block_hash for block in blocks] == hashes


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60))
def test_a_mirror_is_right_whenever_its_reader_is_up_to_date(mirror_type, operations):
    """0 to 5 toggle a block, 6 clears, 7 and 8 read a part, 9 reconnects."""
    log = KvEventLog(block_size=2, max_changes=4)
    known: set[int] = set()
    mirror, reader = mirror_type(), KvEventReader(log)
    for operation in [*operations, 9, *[7] * 8]:
        if operation < 6 and operation in known:
            known.remove(operation)
            log.removed(HASHES[operation])
        elif operation < 6:
            known.add(operation)
            store(log, operation)
        elif operation == 6:
            known = {number for number in known if number % 2}
            log.cleared(but=[HASHES[number] for number in known])
        elif operation == 9:
            reader = KvEventReader(log, log.stream_id, mirror.sequence)
        else:
            changes = reader.read(1 if operation == 7 else 150)
            known_hashes = set() if changes.cleared else mirror.map.keys() - changes.removed
            for block in changes.stored:
                assert block.parent_hash in known_hashes or block.parent_hash not in log.hashes, "parents come first"
                known_hashes.add(block.block_hash)
            mirror.apply(*changes)
            if reader.is_up_to_date:
                assert set(mirror.map) == {HASHES[number] for number in known}
    assert reader.is_up_to_date


@pytest.mark.parametrize(("seed", "num_host_blocks"), [(0, 0), (1, 4), (2, 25)])
def test_mirrors_equal_the_caches_map_after_10000_random_operations(
    random_cache_type, mirror_type, seed, num_host_blocks
):
    """And what is found in the pool, or in the host tier, lies there."""
    cache = random_cache_type(seed, num_host_blocks=num_host_blocks)
    rng = random.Random(seed)
    log = cache.kv.events
    # One reads often, one seldom, one so seldom that it falls behind; all are cut off now and then, in the middle too.
    chances = (0.3, 0.02, 0.0003)
    mirrors = [mirror_type() for _ in chances]
    readers = [KvEventReader(log) for _ in chances]
    num_compared = 0
    for number in range(10_000):
        cache.operate()
        if number % 50 == 0:
            cache.check()
        for index, chance in enumerate(chances):
            if rng.random() > chance:
                continue
            if rng.random() < 0.1:
                readers[index] = KvEventReader(log, log.stream_id, mirrors[index].sequence)
            mirrors[index].apply(*readers[index].read(rng.choice((1, 500, ENDLESS))))
            if readers[index].is_up_to_date:
                assert mirrors[index].map == cache.map
                num_compared += 1
    assert num_compared > 500
    assert (cache.num_copied_in > 100) == (num_host_blocks > 0)
    for mirror, reader in zip(mirrors, readers, strict=True):
        while not reader.is_up_to_date:
            mirror.apply(*reader.read(500))
        assert mirror.map == cache.map
    assert mirrors[0].num_cleared > 1, "the pool was flushed and reset, which is told by a fresh beginning"
    assert log.sequence > 3 * MIN_EVENTS_KEPT, "too little happened for anybody to fall behind"
