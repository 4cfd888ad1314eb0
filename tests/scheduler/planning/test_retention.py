"""Retained KV in the scheduler: a continuation finds its context, and nobody who runs loses anything by that."""

from collections import deque

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.admission.intake import MAX_PASSED
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams, StepPlan
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeWorker, token_of_history

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
NUM_BLOCKS = 64


class Engine:
    """A scheduler and a worker of 64 blocks, and a clock that stands still unless it is moved."""

    def __init__(self, new_request, received_type, enable_prefix_caching=True):
        self.new_request, self.received_type = new_request, received_type
        facts = FakeExecutor(num_blocks=NUM_BLOCKS, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE).facts
        slots = CheckedSlots(NUM_BLOCKS, BLOCK_SIZE)
        self.worker = FakeWorker(facts, token_of_history(VOCAB_SIZE), slots)
        self.max_model_len = facts.max_model_len
        self.now = 0.0
        config = SchedulerConfig(enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(facts, config, clock=lambda: self.now)
        self.plans: deque[StepPlan] = deque()

    def add(self, name, prompt, **fields):
        request = self.new_request(name, prompt, block_size=BLOCK_SIZE, **fields)
        received = self.received_type(request, self.max_model_len, VOCAB_SIZE)
        self.scheduler.add_request(request)
        return received

    def step(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(plan)
        if len(self.plans) == 2 or (plan is None and self.plans):
            self.scheduler.update(self.worker.run(self.plans.popleft()))

    def finish(self, *received):
        while any(one.finished is None for one in received):
            self.step()
        while self.plans:
            self.step()
        for one in received:
            one.check_end()

    def run(self, name, prompt, **fields):
        """A request from beginning to end; returns it with what it computed and the context that it left."""
        received = self.add(name, prompt, **fields)
        before = self.scheduler.counters.prefill_tokens
        self.finish(received)
        return received, self.scheduler.counters.prefill_tokens - before, received.finished.context

    def fill_the_pool_twice_over(self, name="other"):
        """Traffic of which each request leaves 8 blocks in the cache."""
        for number in range(2 * NUM_BLOCKS // 8):
            self.run(f"{name} {number}", prompt_of(f"{name} {number}", 8 * BLOCK_SIZE), max_tokens=1)

    def is_cached(self, prompt, tenant="default"):
        hashes = hash_blocks(prompt, BLOCK_SIZE, tenant_salt("fake", tenant))
        return [self.scheduler.kv.pool.find(block_hash) is not None for block_hash in hashes]


def prompt_of(name, num_tokens):
    """Different prompts for different names, from the first token on."""
    seed = sum(map(ord, name)) * 31 + len(name)
    return [(seed + 7 * position + position * position) % VOCAB_SIZE for position in range(num_tokens)]


@pytest.fixture
def new_engine(new_request, received_type):
    return lambda **fields: Engine(new_request, received_type, **fields)


@pytest.fixture
def engine(new_engine):
    return new_engine()


@pytest.mark.parametrize("num_output", [1, 15, 16, 17, 30])
def test_a_continuation_computes_its_new_tokens_and_at_most_16_old_ones(engine, num_output):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=num_output, retain_s=60.0)
    assert len(context.token_ids) == 300 + num_output
    engine.fill_the_pool_twice_over()
    engine.now = 59.0
    new = prompt_of("new", 20)
    _, computed, _ = engine.run("second", context.token_ids + new, max_tokens=3)
    assert 20 < computed <= 20 + 16


def test_without_retention_it_computes_everything_again(engine):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10)
    engine.fill_the_pool_twice_over()
    _, computed, _ = engine.run("second", [*context.token_ids, 1, 2, 3], max_tokens=3)
    assert computed == 313


def test_after_its_time_it_goes_first(engine):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)
    young = prompt_of("young", 20 * BLOCK_SIZE)
    engine.run("young", young, max_tokens=1)
    engine.now = 60.0
    engine.run("large", prompt_of("large", 40 * BLOCK_SIZE), max_tokens=1)
    assert all(engine.is_cached(young))
    assert not all(engine.is_cached(context.token_ids))


def test_each_turn_of_a_conversation_keeps_it(engine):
    context = engine.run("0", prompt_of("first", 100), max_tokens=10, retain_s=60.0)[2]
    for turn in range(1, 5):
        engine.now += 50.0
        engine.fill_the_pool_twice_over(f"beside {turn}")
        _, computed, context = engine.run(
            str(turn), context.token_ids + prompt_of(f"turn {turn}", 20), max_tokens=10, retain_s=60.0
        )
        assert computed <= 20 + 16
    engine.now += 60.0
    engine.run("last", prompt_of("last", 10))
    assert engine.scheduler.kv.pool.num_retained == 0


def test_branches_of_a_conversation_share_what_is_kept(engine):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)
    engine.fill_the_pool_twice_over()
    for number in range(3):
        branch = context.token_ids + prompt_of(f"branch {number}", 20)
        assert engine.run(f"branch {number}", branch, max_tokens=3)[1] <= 20 + 16


def test_eviction_under_pressure_takes_ordinary_cache_then_the_nearest_expiry_and_tails_first(engine):
    late = engine.run("late", prompt_of("late", 160), max_tokens=1, tenant="a", retain_s=90.0)[2].token_ids
    soon = engine.run("soon", prompt_of("soon", 160), max_tokens=1, tenant="b", retain_s=30.0)[2].token_ids
    plain = prompt_of("plain", 161)
    engine.run("plain", plain, max_tokens=1)
    # 64 blocks: 11 and 10 are retained, 10 ordinary, the rest blank. Each of these takes some more and keeps them.
    seen = []
    growing = engine.add("growing", prompt_of("growing", 10 * BLOCK_SIZE), max_tokens=50 * BLOCK_SIZE)
    while growing.finished is None:
        engine.step()
        seen.append([engine.is_cached(plain), engine.is_cached(soon, "b"), engine.is_cached(late, "a")])
    growing.check_end()
    assert engine.scheduler.counters.preemptions == 0
    for was_plain, was_soon, was_late in seen:
        for blocks in (was_plain, was_soon, was_late):
            assert blocks == sorted(blocks, reverse=True), "a head went before its tail"
        assert all(was_soon) or not any(was_plain)
        assert all(was_late) or not any(was_soon)
    assert [any(blocks) for blocks in seen[-1]] == [False, False, True]


def test_nobody_who_runs_is_preempted_while_there_are_retained_blocks(engine):
    for number in range(4):
        engine.run(
            f"kept {number}", prompt_of(f"kept {number}", 130), max_tokens=1, tenant=f"t{number}", retain_s=1000.0
        )
    assert engine.scheduler.kv.pool.num_retained == 32
    # Together they come to need every block there is, and never more.
    running = [
        engine.add(f"running {number}", prompt_of(f"running {number}", 10), max_tokens=16 * BLOCK_SIZE - 10)
        for number in range(4)
    ]
    engine.finish(*running)
    assert engine.scheduler.counters.preemptions == 0
    # And more than there is: preempted only when nothing was left to evict.
    running = [
        engine.add(f"more {number}", prompt_of(f"more {number}", 10), max_tokens=30 * BLOCK_SIZE) for number in range(4)
    ]
    while engine.scheduler.counters.preemptions == 0:
        num_retained = engine.scheduler.kv.pool.num_retained
        engine.step()
    assert num_retained == 0
    engine.finish(*running)


def test_one_tenant_keeps_no_more_than_half_of_the_pool_from_others(engine):
    for number in range(6):
        engine.run(f"{number}", prompt_of(f"greedy {number}", 130), max_tokens=1, tenant="greedy", retain_s=60.0)
    assert engine.scheduler.kv.pool.num_retained == 6 * 8  # as long as there is no other tenant
    engine.run("own", prompt_of("own", 20 * BLOCK_SIZE), max_tokens=1, tenant="greedy")
    assert engine.scheduler.kv.pool.num_retained > NUM_BLOCKS // 2
    other = engine.run("other", prompt_of("other", 130), max_tokens=1, tenant="other", retain_s=5.0)[2].token_ids
    plain = prompt_of("plain", 10 * BLOCK_SIZE)
    engine.run("plain", plain, max_tokens=1, tenant="other")
    engine.run("large", prompt_of("large", 8 * BLOCK_SIZE), max_tokens=1)
    assert all(engine.is_cached(other, "other"))
    assert all(engine.is_cached(plain, "other"))


def test_a_request_whose_prompt_is_retained_goes_before_those_that_need_more(engine):
    context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)[2].token_ids
    plain = engine.run("plain", prompt_of("plain", 300), max_tokens=10)[2].token_ids
    others = [engine.add(f"other {number}", prompt_of(f"other {number}", 200), max_tokens=1) for number in range(3)]
    new = engine.add("new", context + prompt_of("new", 20), max_tokens=1)
    not_retained = engine.add("not retained", plain + prompt_of("new", 20), max_tokens=1)
    much_new = engine.add("much new", context + prompt_of("much new", 110), max_tokens=1)
    positions = [received.accepted.queue_position for received in (*others, new, not_retained, much_new)]
    assert positions == [0, 1, 2, 0, 4, 5]
    engine.finish(*others, new, not_retained, much_new)


def test_a_request_is_passed_only_by_some_of_those_that_arrive_later(engine):
    context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)[2].token_ids
    waiting = engine.add("waiting", prompt_of("waiting", 200), max_tokens=1)
    later = [engine.add(f"{number}", [*context, number], max_tokens=1) for number in range(MAX_PASSED + 2)]
    ahead = [received.accepted.queue_position <= number for number, received in enumerate(later)]
    assert ahead == [True] * MAX_PASSED + [False] * 2
    engine.finish(waiting, *later)


@pytest.mark.parametrize("waits_s", [None, 55.0])
def test_a_request_with_a_target_is_passed_by_none_that_would_come_after_it(engine, waits_s):
    """However old the last requests are that came before it, whether they have ended or wait."""
    engine.now = 1e6
    context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=9e3)[2].token_ids
    engine.now += 3600.0
    others = [] if waits_s is None else [engine.add("waiting", prompt_of("waiting", 200), max_tokens=1)]
    engine.now += waits_s or 0.0
    others.append(engine.add("target", prompt_of("target", 200), max_tokens=1, first_token_target=engine.now + 12))
    others += [engine.add(f"late {number}", prompt_of(f"late {number}", 200), max_tokens=1) for number in range(2)]
    retained = [engine.add(f"{number}", [*context, number], max_tokens=1) for number in range(3)]
    others.append(engine.add("soon", prompt_of("soon", 200), max_tokens=1, first_token_target=engine.now + 12))
    num_ahead = len(others) - 3
    assert [received.accepted.queue_position for received in retained] == [num_ahead + number for number in range(3)]
    assert others[-1].accepted.queue_position == num_ahead
    engine.finish(*others, *retained)


def test_a_cancelled_request_keeps_what_it_had_computed(engine):
    received = engine.add("first", prompt_of("first", 100), max_tokens=500, retain_s=60.0)
    while len(received.token_ids.get(0, [])) < 60:
        engine.step()
    engine.scheduler.abort("first", EngineFinishReason.CANCELLED)
    engine.finish(received)
    context = received.finished.context
    engine.fill_the_pool_twice_over()
    assert engine.run("second", [*context.token_ids, 1, 2, 3], max_tokens=3)[1] <= 3 + 16


def test_what_the_worker_took_along_is_computed_again(engine):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)
    engine.scheduler.recover(blames_step=False)
    facts = FakeExecutor(num_blocks=NUM_BLOCKS, vocab_size=VOCAB_SIZE, block_size=BLOCK_SIZE).facts
    engine.worker = FakeWorker(facts, token_of_history(VOCAB_SIZE), CheckedSlots(NUM_BLOCKS, BLOCK_SIZE))
    assert engine.scheduler.kv.pool.num_retained == 0
    assert engine.run("second", [*context.token_ids, 1, 2, 3], max_tokens=3)[1] == 313


def test_without_a_prefix_cache_nothing_is_kept(new_engine):
    engine = new_engine(enable_prefix_caching=False)
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)
    assert engine.scheduler.kv.pool.num_retained == 0
    assert engine.run("second", [*context.token_ids, 1, 2, 3], max_tokens=3)[1] == 313


def test_sampled_and_stopped_requests_leave_a_context_as_well(engine):
    sampling = SamplingParams(seed=5, stop_token_ids=tuple(range(0, VOCAB_SIZE, 20)))
    received, _, context = engine.run(
        "first", prompt_of("first", 300), max_tokens=400, sampling=sampling, retain_s=60.0
    )
    assert received.finished.reason is EngineFinishReason.STOP
    assert context.token_ids == prompt_of("first", 300) + received.token_ids[0][:-1]
    engine.fill_the_pool_twice_over()
    assert engine.run("second", [*context.token_ids, 1, 2, 3], max_tokens=3)[1] <= 3 + 16


def test_what_was_kept_for_one_stays_kept_when_another_has_used_it(engine):
    _, _, context = engine.run("first", prompt_of("first", 300), max_tokens=10, retain_s=60.0)
    engine.run("second", context.token_ids + prompt_of("second", 20), max_tokens=3)
    engine.fill_the_pool_twice_over()
    assert engine.run("third", context.token_ids + prompt_of("third", 20), max_tokens=3)[1] <= 20 + 16
