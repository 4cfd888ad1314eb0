"""Evicted prefixes that are copied back from host memory, and those that are rather computed again."""

import pytest
from worlds import run

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan
from penstock.scheduler.planning.restore_policy import HostTierRestorePolicy
from penstock.scheduler.testing.fake_states import BrokenPlan
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeWorker, token_of_history
from penstock.scheduler.testing.simulation import cpu_step_s
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork
from penstock.scheduler.worker_config import WorkerFacts

CONFIG = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=64)
NUM_BLOCKS = 11


def prompt(length, first=0):
    return [(first + position * position // 5) % 7 for position in range(length)]


PROMPT = prompt(33)
"""Of eight blocks, and a token."""


@pytest.fixture
def world(world_type):
    """With copies that cost nothing."""
    return world_type(NUM_BLOCKS, CONFIG, num_host_blocks=20)


def evict(world, new_request, name="other"):
    """Another request needs all blocks."""
    run(world, new_request, name, prompt(40, first=3), max_tokens=2)


def test_an_evicted_prefix_is_copied_back_before_its_row_is_computed(world, new_request):
    first, _ = run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    # What the CheckedSlots of the fake worker hold is what was computed, or a row that begins after it would fail.
    again, [begin, *_] = run(world, new_request, "again", PROMPT, max_tokens=2)
    [added] = begin.added
    assert added.num_computed == 32
    assert [block for _, block in begin.copies_in] == added.block_ids[:8]
    assert begin.chunks == [Chunk(added.row, 32, 33)]
    assert {block for block, _ in begin.copies_out} <= set(added.block_ids)
    assert again.token_ids == first.token_ids
    assert again.accepted.cached_tokens == again.finished.usage.cached_tokens == 32
    assert world.scheduler.kv.num_restored_tokens == 32
    assert world.scheduler.counters.cached_tokens == 32


def test_what_the_device_still_has_is_shared_and_the_rest_copied(world, new_request):
    run(world, new_request, "first", PROMPT, max_tokens=2)
    run(world, new_request, "other", prompt(20, first=3), max_tokens=2)
    _, [begin, *_] = run(world, new_request, "again", PROMPT, max_tokens=2)
    [added] = begin.added
    assert added.num_computed == 32
    assert 0 < len(begin.copies_in) < 8
    assert [block for _, block in begin.copies_in] == added.block_ids[8 - len(begin.copies_in) : 8]


def test_rows_that_begin_together_share_what_is_copied_once(world, new_request):
    run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    world.add(new_request("one", PROMPT, max_tokens=2))
    world.add(new_request("two", PROMPT, max_tokens=2))
    world.schedule()
    [plan] = world.plans
    one, two = plan.added
    assert one.block_ids[:8] == two.block_ids[:8]
    assert (one.num_computed, two.num_computed, len(plan.copies_in)) == (32, 32, 8)
    world.drain()


def test_a_preempted_rows_history_comes_back(world_type, new_request):
    world = world_type(NUM_BLOCKS, CONFIG, num_host_blocks=20)
    world.add(new_request("large", prompt(18), max_tokens=20))
    world.add(new_request("larger", prompt(18, first=3), max_tokens=20))
    world.drain()
    assert world.scheduler.counters.preemptions > 0
    assert world.scheduler.kv.num_restored_tokens > 0


def test_without_room_in_host_memory_it_is_computed_again(world_type, new_request):
    world = world_type(NUM_BLOCKS, CONFIG)
    run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    again, plans = run(world, new_request, "again", PROMPT, max_tokens=2)
    assert again.finished.usage.cached_tokens == 0
    assert not any(plan.copies_out or plan.copies_in for plan in plans)


@pytest.mark.parametrize(("copy_s", "pays"), [(1e-6, True), (1e3, False)])
def test_where_copying_takes_longer_it_is_computed_again(world_type, new_request, copy_s, pays):
    """Steps are found to take a second, whatever is in them."""
    world = world_type(NUM_BLOCKS, CONFIG, num_host_blocks=20, copy_us_per_block=1e6 * copy_s)
    first, _ = run(world, new_request, "first", PROMPT, max_tokens=2)
    for number in range(4):
        evict(world, new_request, f"other {number}")
    again, _ = run(world, new_request, "again", PROMPT, max_tokens=2)
    assert again.token_ids == first.token_ids
    cached = 32 if pays else 0
    assert again.accepted.cached_tokens == again.finished.usage.cached_tokens == cached
    assert world.scheduler.kv.num_restored_tokens == cached


def test_when_the_worker_dies_nothing_of_host_memory_is_used_any_more(world, new_request):
    first, _ = run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    assert len(world.scheduler.kv.host) >= 8
    world.recover(blames_step=False)
    world.check()
    assert len(world.scheduler.kv.host) == 0
    again, plans = run(world, new_request, "again", PROMPT, max_tokens=2)
    assert again.token_ids == first.token_ids
    assert again.finished.usage.cached_tokens == 0
    assert not any(plan.copies_out or plan.copies_in for plan in plans)


def test_a_worker_that_dies_amid_copies_has_made_none(world, new_request):
    run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    world.add(new_request("again", PROMPT, max_tokens=2))
    world.schedule()
    assert world.plans[0].copies_in
    world.recover(blames_step=True)
    world.drain()
    assert world.received["again"].finished.usage.cached_tokens == 32, "as told when it first began"
    assert world.scheduler.counters.prefill_tokens == 33 + 40 + 1 + 33


def test_a_flush_forgets_it(world, new_request):
    run(world, new_request, "first", PROMPT, max_tokens=2)
    evict(world, new_request)
    world.scheduler.kv.flush()
    again, _ = run(world, new_request, "again", PROMPT, max_tokens=2)
    assert again.finished.usage.cached_tokens == 0


def test_another_tenant_finds_nothing(world, new_request):
    run(world, new_request, "first", PROMPT, tenant="one", max_tokens=2)
    evict(world, new_request)
    again, _ = run(world, new_request, "again", PROMPT, tenant="other", max_tokens=2)
    assert again.finished.usage.cached_tokens == 0


def test_it_pays_as_far_as_the_whole_of_it_is_sooner_copied():
    """With what the demo model takes on one core: 40 us a token at first, and more the more it sees."""
    model = StepTimeModel()
    for end in range(64, 6400, 64):
        for work in (StepWork(64, 64 * (end - 32), 0, 0, 1, end), StepWork(0, 0, 1, end)):
            model.observe(work, cpu_step_s(work))
    kv = KVCacheManager(1, 16, num_host_blocks=1000)
    hashes = [number.to_bytes(4, "little") for number in range(512)]
    for block_hash in hashes:
        kv.host.store(block_hash)

    def num_restored(copy_s, num_found, num_evicted):
        facts = WorkerFacts(
            1, 16, 10, 16_384, 1, 2048, "", "", "", "", "", 0, 0, num_host_blocks=1000, copy_us_per_block=1e6 * copy_s
        )
        return len(HostTierRestorePolicy(kv, model, facts).find(hashes, num_found, 16 * (num_found + num_evicted) + 1))

    assert num_restored(0.1e-3, 0, 10) == 10
    assert num_restored(3e-3, 0, 10) == 0
    # The same blocks pay behind a long prefix, and those of a long sequence pay together.
    assert num_restored(3e-3, 500, 10) == 10
    assert num_restored(3e-3, 0, 512) == 512
    assert num_restored(30e-3, 0, 512) == 0


# What the checker finds ----------------------------------------------------------------------------------------------


def checked_worker():
    """A worker with a prompt of two blocks in blocks 0 and 1, whose row has ended."""
    facts = WorkerFacts(4, 4, 7, 44, 2, 64, "fake", "fake", "cpu", "float32", "float32", 0, 0, num_host_blocks=2)
    worker = FakeWorker(facts, token_of_history(7), CheckedSlots(4, 4, 2))
    worker.run(StepPlan(0, [], [AddedRow(0, 1, [5] * 9, 9, 0, [0, 1, 2], SamplingParams())], [], [Chunk(0, 0, 9)], []))
    worker.run(StepPlan(1, [0], [], [], [], []))
    return worker


def begin_after_prefix(block_ids, **copies):
    added = AddedRow(1, 1, [5] * 9, 9, 8, block_ids, SamplingParams())
    return StepPlan(2, [], [added], [], [Chunk(1, 8, 9)], [], **copies)


def test_the_checker_takes_what_is_right():
    plan = begin_after_prefix([3, 1, 0], copies_out=[(0, 1)], copies_in=[(1, 3)])
    assert checked_worker().run(plan).rows[0].num_computed == 9


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (begin_after_prefix([3, 1, 0], copies_out=[(1, 1)], copies_in=[(1, 3)]), "stale"),
        (begin_after_prefix([3, 1, 0], copies_in=[(1, 3)]), "stale"),
        (begin_after_prefix([3, 1, 0], copies_out=[(2, 1)]), "not whole"),
        (begin_after_prefix([0, 1, 3], copies_out=[(0, 0), (1, 0)]), "twice"),
        (begin_after_prefix([0, 1, 3], copies_in=[(0, 3), (1, 3)]), "twice"),
    ],
)
def test_the_checker_finds_wrong_copies(plan, says):
    with pytest.raises(BrokenPlan, match=says):
        checked_worker().run(plan)


def test_the_checker_finds_a_copy_to_what_a_row_holds():
    worker = checked_worker()
    worker.run(begin_after_prefix([0, 1, 2], copies_out=[(0, 0)]))
    with pytest.raises(BrokenPlan, match="which a row holds"):
        worker.run(StepPlan(3, [], [], [], [], [], copies_in=[(0, 2)]))
