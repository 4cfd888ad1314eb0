"""Tokens that are injected into outputs, as the planner sees them."""

import pytest

from penstock.kv import block_hash, manager
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.planning.sequence import SequenceStatus
from penstock.scheduler.timeline_entry import EntryKind

PROMPT = [position % 7 for position in range(20)]


@pytest.fixture
def running(world_type, new_request):
    """A request with some output."""
    world = world_type(12, SchedulerConfig(max_num_seqs=4))
    world.add(new_request("read late", PROMPT, max_tokens=12))
    for _ in range(6):
        world.step()
    return world


def inject(world, *token_ids):
    world.received["read late"].to_inject += token_ids
    assert world.scheduler.inject("read late", token_ids)


def answer_all(world):
    while world.answer():
        pass


@pytest.mark.parametrize("first", ["held", "injected"])
def test_a_held_request_keeps_no_blocks(running, new_request, first):
    scheduler = running.scheduler
    actions = [lambda: scheduler.hold("read late", True), lambda: inject(running, 3, 4)]
    for action in actions if first == "held" else reversed(actions):
        action()
    answer_all(running)
    [sequence] = scheduler.requests["read late"].sequences
    assert sequence.state is SequenceStatus.WAITING
    assert not sequence.pinned
    running.check()
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    running.add(new_request("needs all blocks", [5, 6] * 16, max_tokens=14))
    while running.received["needs all blocks"].finished is None:
        running.step()
    assert running.received["needs all blocks"].finished.timings.preemptions == 0
    running.drain()


def test_one_that_is_read_keeps_what_it_has_computed(running):
    inject(running, 3, 4)
    answer_all(running)
    [sequence] = running.scheduler.requests["read late"].sequences
    assert len(sequence.pinned) >= len(PROMPT) // 4
    running.check()
    running.drain()


def test_the_cost_of_an_injection_is_that_of_what_is_new(running, monkeypatch):
    """The blocks of the history are neither hashed nor looked up again."""
    num_hashed, num_wanted = 0, 0
    hash_blocks, add_owner = block_hash.hash_blocks, running.scheduler.kv.wanted.add_owner

    def hashing(token_ids, *rest):
        nonlocal num_hashed
        num_hashed += len(token_ids)
        return hash_blocks(token_ids, *rest)

    def wanting(owner, hashes, goes_before):
        nonlocal num_wanted
        num_wanted += len(hashes)
        return add_owner(owner, hashes, goes_before)

    monkeypatch.setattr(manager, "hash_blocks", hashing)
    monkeypatch.setattr(running.scheduler.kv.wanted, "add_owner", wanting)
    inject(running, 3, 4, 5, 6, 0)
    for _ in range(4):
        running.step()
    [sequence] = running.scheduler.requests["read late"].sequences
    assert sequence.num_injected == 5
    assert num_wanted == 0
    assert 0 < num_hashed <= 12
    running.drain()


def test_the_timeline_shows_it(running):
    inject(running, 3, 4)
    inject(running, 5)
    answer_all(running)
    entries = running.scheduler.explain("read late").entries()
    assert [entry.num_tokens for entry in entries if entry.kind is EntryKind.INJECTED] == [2, 1]
    running.drain()
