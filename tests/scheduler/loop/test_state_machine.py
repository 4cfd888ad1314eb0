"""Scheduler and KV under random operations, checked after each one; and the checker, checked with planted bugs.

Figures 1 and 2 of the reliability targets: blocks and reference counts, and who wrote what a row reads.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from penstock.kv.block_pool import BlockPool
from penstock.kv.events import KvEventLog
from penstock.kv.host_tier import HostTier
from penstock.kv.manager import KVCacheManager
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.output_processor import OutputProcessor
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.planning.preemption import PreemptionPolicy
from penstock.scheduler.planning.prefill_adder import PrefillAdder
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.sequence import SequenceState, SequenceStatus
from penstock.scheduler.planning.stop_checker import OutputBuffer
from penstock.scheduler.policy import Policy
from penstock.scheduler.recovery.crash_bisector import CrashBisector
from penstock.scheduler.request import EngineFinishReason, Request
from penstock.scheduler.testing.fake_worker import FakeRow, WorkerKilled

NUMBERS = st.integers(0, 2**16)


def random_config(number: int) -> tuple[int, SchedulerConfig, int, int]:
    """Pools that hold the largest request hardly more than once, so that most sequences preempt and evict; and slots of
    the host tier, none, few or many."""
    rng = random.Random(number)
    budget = rng.choice((4, 9, 32, 64))
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=budget,
        max_queued_requests=rng.choice((2, 100)),
        max_queued_tokens=rng.choice((40, 1000)),
        policy=rng.choice(tuple(Policy)),
        enable_prefix_caching=rng.random() < 0.75,
        max_plans_in_flight=rng.choice((1, 2, 2, 2)),
        target_itl_s=rng.choice((None, None, 0.5, 3.0)),
    )
    return rng.randint(8, 22), config, budget, rng.choice((0, 3, 40))


class SchedulerMachine(RuleBasedStateMachine):
    """One world a sequence."""

    new_world: Callable[..., Any]

    @initialize(number=NUMBERS)
    def begin(self, number):
        *limits, num_host_blocks = random_config(number)
        self.world = self.new_world(*limits, num_host_blocks=num_host_blocks)
        self.is_whole = True

    def do(self, operation, *args):
        self.is_whole = False
        operation(*args)
        self.world.check()
        self.is_whole = True

    @rule(number=NUMBERS)
    def add(self, number):
        self.do(self.world.add_random, number)

    @rule(number=NUMBERS)
    def add_three(self, number):
        for offset in range(3):
            self.do(self.world.add_random, number + offset)

    @rule(number=NUMBERS)
    def cancel(self, number):
        self.do(self.world.cancel, number)

    @rule()
    def schedule(self):
        self.do(self.world.schedule)

    @rule()
    def answer(self):
        self.do(self.world.answer)

    @rule(count=st.integers(1, 8))
    def turns(self, count):
        for _ in range(count):
            self.do(self.world.schedule)
            if len(self.world.plans) == self.world.config.max_plans_in_flight:
                self.do(self.world.answer)

    @rule(number=NUMBERS)
    def hold(self, number):
        self.do(self.world.hold, number)

    @rule(number=NUMBERS)
    def update(self, number):
        self.do(self.world.update, number)

    @rule(number=NUMBERS, chance=st.integers(0, 3))
    def reconfigure(self, number, chance):
        if chance == 3:
            self.do(self.world.reconfigure, number)

    @rule(blames_step=st.booleans(), chance=st.integers(0, 3))
    def recover(self, blames_step, chance):
        if chance == 3:
            self.do(self.world.recover, blames_step)

    @rule(chance=st.integers(0, 7))
    def die(self, chance):
        if chance == 7:
            self.do(self.world.die)

    def teardown(self):
        # What is broken already would only break again, for other reasons.
        if getattr(self, "is_whole", False):
            self.world.drain()


def explore(world_type, num_sequences: int, num_operations: int, *, shrink: bool = True) -> None:
    run_state_machine_as_test(
        type("Machine", (SchedulerMachine,), {"new_world": world_type}),
        settings=settings(
            max_examples=num_sequences,
            stateful_step_count=num_operations,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        ),
    )


def test_reliability_figure_1_2000_sequences(world_type):
    explore(world_type, 2000, 20)


@pytest.mark.soak
def test_reliability_figure_1_10000_sequences_of_200_operations(world_type):
    explore(world_type, 10_000, 200)


@pytest.fixture(scope="session")
def deadly_world_type(world_type):
    """A world with requests that end their worker."""

    class DeadlyWorld(world_type):  # type: ignore[valid-type, misc]
        """Some requests kill the worker with their third token; nobody else is ever to blame."""

        def is_killer(self, request: Request) -> bool:
            return request.sampling.seed == 2 and len(request.prompt_token_ids) % 4 == 0

        def kills(self, row: FakeRow) -> bool:
            killing = row.sampling.seed == 2 and row.num_prompt_tokens % 4 == 0
            return killing and len(row.history) - row.num_prompt_tokens >= 2

        def answer(self):
            try:
                return super().answer()
            except WorkerKilled:
                super().recover(blames_step=True)
                return True

        def recover(self, blames_step: bool) -> None:
            super().recover(blames_step=False)

        def schedule(self):
            planned = super().schedule()
            on_trial, rows = self.scheduler._bisector.on_trial, self.scheduler._planner.rows
            if planned and on_trial:
                plan = self.plans[-1]
                for row in [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]:
                    request_id = rows.current(row).live.request.request_id
                    assert request_id in on_trial, f"request {request_id} runs beside those on trial"
            return planned

        def drain(self) -> None:
            super().drain()
            for name, received in self.received.items():
                assert received.finished is not None
                refused = received.finished.reason is EngineFinishReason.KILLED_WORKER
                assert not refused or self.is_killer(received.request), f"request {name} is innocent"
            assert not self.scheduler._bisector
            assert not self.scheduler._bisector._records

    return DeadlyWorld


def test_reliability_figure_14_200_sequences_with_killers(deadly_world_type):
    explore(deadly_world_type, 200, 20)


@pytest.mark.soak
def test_reliability_figure_14_5000_sequences_of_100_operations_with_killers(deadly_world_type):
    explore(deadly_world_type, 5000, 100)


# Planted bugs: the checker must find each of them


def leaked_block(patch):
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, block_ids[:-1]))


def double_free(patch):
    free = KVCacheManager.free

    def free_twice(kv, block_ids):
        free(kv, block_ids)
        free(kv, block_ids[-1:])

    patch.setattr(KVCacheManager, "free", free_twice)


def shared_block_not_counted(patch):
    patch.setattr(BlockPool, "share", lambda pool, block_ids: [pool._cached.pop(block, None) for block in block_ids])


def shared_block_left_in_the_lru(patch):
    def share(pool, block_ids):
        for block in block_ids:
            pool._refcounts[block] += 1

    patch.setattr(BlockPool, "share", share)


def hash_kept_after_eviction(patch):
    def evict(pool):
        block, _ = pool._cached.popitem(last=False)
        return block

    patch.setattr(BlockPool, "_evict", evict)


def eviction_that_is_not_told(patch):
    patch.setattr(KvEventLog, "removed", lambda log, block_hash: None)


def published_when_its_tokens_are_known(patch):
    begin = PrefillAdder._begin

    def begin_and_publish(prefill_adder, plan, sequence, block_ids, num_cached_blocks):
        begin(prefill_adder, plan, sequence, block_ids, num_cached_blocks)
        num_full = len(sequence.token_ids) // prefill_adder._kv.block_size
        prefill_adder._kv.publish(block_ids, sequence.hashes, num_cached_blocks, num_full, sequence.token_ids)

    patch.setattr(PrefillAdder, "_begin", begin_and_publish)


def published_one_slot_early(patch):
    confirmed = Planner.publish_confirmed

    def publish_early(planner, sequence):
        sequence.num_computed += 1
        confirmed(planner, sequence)
        sequence.num_computed -= 1

    patch.setattr(Planner, "publish_confirmed", publish_early)


def row_number_reused_at_once(patch):
    def drop(rows, row):
        rows._dropped.append(row)
        rows._free.append(row)

    patch.setattr(RowIdAllocator, "free_row", drop)
    patch.setattr(RowIdAllocator, "reclaim", lambda rows, numbers: None)


def row_number_reused_before_the_drop_is_answered(patch):
    say_drops = RowIdAllocator.say_drops

    def say_and_reclaim(rows):
        dropped = say_drops(rows)
        for row in dropped:
            rows._free.append(row)
        return dropped

    patch.setattr(RowIdAllocator, "say_drops", say_and_reclaim)
    patch.setattr(RowIdAllocator, "reclaim", lambda rows, numbers: None)


def row_never_dropped(patch):
    patch.setattr(RowIdAllocator, "say_drops", lambda rows: [])


def token_in_flight_lost_at_preemption(patch):
    apply = OutputProcessor.apply

    def apply_to_running(answers, row):
        sequence = answers._planner.rows.holder(row.row, row.epoch)
        if sequence.state is SequenceStatus.WAITING:
            sequence.length_bound -= sequence.in_flight.popleft()
        else:
            apply(answers, row)

    patch.setattr(OutputProcessor, "apply", apply_to_running)


def begun_again_before_its_newest_plan_is_answered(patch):
    leave_row = SequenceState.leave_row

    def leave_and_forget(sequence):
        leave_row(sequence)
        sequence.length_bound -= sum(sequence.in_flight)
        sequence.in_flight.clear()

    patch.setattr(SequenceState, "leave_row", leave_and_forget)


def tokens_in_flight_not_counted(patch):
    """A row that could end with what is in flight is continued all the same."""
    begin = SequenceState.start_row

    def begin_with_a_higher_limit(sequence, *args):
        begin(sequence, *args)
        sequence.length_limit += 1

    patch.setattr(SequenceState, "start_row", begin_with_a_higher_limit)


def token_after_a_stop(patch):
    take = OutputBuffer.take_tokens

    def take_and_go_on(output, token_ids, logprobs):
        delta = take(output, token_ids, logprobs)
        if delta is not None and delta.end is not None:
            delta.token_ids.append(token_ids[-1])
        return delta

    patch.setattr(OutputBuffer, "take_tokens", take_and_go_on)


def whole_prompt_from_the_cache(patch):
    find_prefix = KVCacheManager.find_prefix
    patch.setattr(KVCacheManager, "find_prefix", lambda kv, hashes, num_tokens: find_prefix(kv, hashes, num_tokens + 1))


def leader_that_never_retracts(patch):
    patch.setattr(KVCacheManager, "retract", lambda kv, leader, hashes: None)


def fork_without_its_own_references(patch):
    patch.setattr(KVCacheManager, "share", lambda kv, block_ids: None)


def prompt_logprobs_repeated_after_preemption(patch):
    apply = Scheduler._apply_prompt_logprobs

    def apply_from_the_start(scheduler, part):
        live = scheduler._planner.rows.holder(part.row, part.epoch).live
        live.num_prompt_logprobs = part.start
        apply(scheduler, part)

    patch.setattr(Scheduler, "_apply_prompt_logprobs", apply_from_the_start)


def victim_of_the_highest_rank(patch):
    patch.setattr(
        PreemptionPolicy,
        "victim_for_decode",
        lambda preemption, needy, later: min(preemption._running, key=lambda c: c.rank),
    )


def cache_kept_over_a_restart(patch):
    patch.setattr(KVCacheManager, "reset", lambda kv: None)


def in_flight_over_a_restart(patch):
    restart = SequenceState.restart

    def restart_and_wait_for_answers(sequence):
        in_flight = list(sequence.in_flight)
        restart(sequence)
        sequence.in_flight.extend(in_flight)

    patch.setattr(SequenceState, "restart", restart_and_wait_for_answers)


def slot_overwritten_before_it_is_copied_back(patch):
    patch.setattr(HostTier, "restore", lambda tier, block_hash: tier._slots[block_hash])


def evicted_blocks_not_copied_out(patch):
    take_copies = KVCacheManager.take_copies
    patch.setattr(KVCacheManager, "take_copies", lambda kv: ([], take_copies(kv)[1]))


def restored_blocks_not_copied_in(patch):
    take_copies = KVCacheManager.take_copies
    patch.setattr(KVCacheManager, "take_copies", lambda kv: (take_copies(kv)[0], []))


def copies_left_to_the_next_plan(patch):
    take_copies = KVCacheManager.take_copies

    def take_late(kv):
        copies_out, copies_in = take_copies(kv)
        late = vars(kv).get("late", [])
        kv.late = copies_out
        return late, copies_in

    patch.setattr(KVCacheManager, "take_copies", take_late)


def eviction_told_though_the_host_tier_has_the_block(patch):
    store = HostTier.store

    def store_in_secret(tier, block_hash):
        slot = store(tier, block_hash)
        if slot is not None:
            tier._on_overwritten(block_hash)
        return slot

    patch.setattr(HostTier, "store", store_in_secret)


def drafts_without_blocks(patch):
    patch.setattr(Planner, "_hold_drafts", lambda planner, plan, choice, num_drafts: num_drafts)


def drafts_beyond_the_budget(patch):
    plan_drafts = Planner._plan_drafts
    patch.setattr(Planner, "_plan_drafts", lambda planner, plan, rows, room: plan_drafts(planner, plan, rows, 9))


def drafts_that_fail_not_taken_back(patch):
    patch.setattr(SequenceState, "fall_short", lambda choice, num_tokens: None)


PLANTED_BUGS = [
    leaked_block,
    double_free,
    shared_block_not_counted,
    shared_block_left_in_the_lru,
    hash_kept_after_eviction,
    eviction_that_is_not_told,
    published_when_its_tokens_are_known,
    published_one_slot_early,
    row_number_reused_at_once,
    row_number_reused_before_the_drop_is_answered,
    row_never_dropped,
    token_in_flight_lost_at_preemption,
    begun_again_before_its_newest_plan_is_answered,
    tokens_in_flight_not_counted,
    token_after_a_stop,
    whole_prompt_from_the_cache,
    leader_that_never_retracts,
    fork_without_its_own_references,
    prompt_logprobs_repeated_after_preemption,
    victim_of_the_highest_rank,
    cache_kept_over_a_restart,
    in_flight_over_a_restart,
    slot_overwritten_before_it_is_copied_back,
    evicted_blocks_not_copied_out,
    restored_blocks_not_copied_in,
    copies_left_to_the_next_plan,
    eviction_told_though_the_host_tier_has_the_block,
    drafts_without_blocks,
    drafts_beyond_the_budget,
    drafts_that_fail_not_taken_back,
]


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_reliability_figure_1_planted_bug_is_caught(world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        explore(world_type, 2000, 20, shrink=False)


def others_run_beside_those_on_trial(patch):
    patch.setattr(CrashBisector, "may_run", lambda suspects, request_id: True)


def those_that_run_already_stay(patch):
    patch.setattr(Planner, "_leave_alone_those_on_trial", lambda planner: None)


@pytest.mark.parametrize(
    "plant", [others_run_beside_those_on_trial, those_that_run_already_stay], ids=lambda plant: plant.__name__
)
def test_reliability_figure_14_planted_bug_is_caught(deadly_world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        explore(deadly_world_type, 500, 20, shrink=False)
