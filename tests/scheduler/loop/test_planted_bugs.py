"""Planted bugs in scheduler and KV cache: the state machine must find every one of them."""

import pytest

from penstock.kv.block_pool import BlockPool
from penstock.kv.events import KvEventLog
from penstock.kv.host_tier import HostTier
from penstock.kv.manager import KVCacheManager
from penstock.kv.window_blocks import WindowBlocks
from penstock.scheduler.loop.output_processor import OutputProcessor
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.planning.output_buffer import OutputBuffer
from penstock.scheduler.planning.pinned_prefixes import PinnedPrefixes
from penstock.scheduler.planning.planner import Planner
from penstock.scheduler.planning.preemption import PreemptionPolicy
from penstock.scheduler.planning.prefill_adder import PrefillAdder
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.sequence import SequenceState, SequenceStatus
from penstock.scheduler.recovery.crash_bisector import CrashBisector


def leaked_block(patch):
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda pool, block_ids: release(pool, block_ids[:-1]))


def double_free(patch):
    release = BlockPool.release

    def release_twice(pool, block_ids):
        release(pool, block_ids)
        release(pool, block_ids[-1:])

    patch.setattr(BlockPool, "release", release_twice)


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

    def begin_and_publish(prefill_adder, plan, sequence, block_ids, prefix):
        begin(prefill_adder, plan, sequence, block_ids, prefix)
        num_full = len(sequence.token_ids) // prefill_adder._kv.block_size
        prefill_adder._kv.publish(block_ids, sequence.hashes, prefix.num_blocks, num_full, sequence.token_ids)

    patch.setattr(PrefillAdder, "_begin", begin_and_publish)


def published_one_slot_early(patch):
    apply = OutputProcessor.apply

    def apply_and_publish(processor, row):
        apply(processor, row)
        planner = processor._planner
        sequence = planner.rows.holder(row.row, row.epoch)
        num_full = (sequence.num_computed + 1) // planner.kv.block_size
        if sequence.row == row.row and num_full > sequence.num_published:
            planner.publish(sequence, num_full)

    patch.setattr(OutputProcessor, "apply", apply_and_publish)


def row_number_reused_at_once(patch):
    def drop(rows, row):
        rows._dropped.append(row)
        rows._free.append(row)

    patch.setattr(RowIdAllocator, "free_row", drop)
    patch.setattr(RowIdAllocator, "reclaim", lambda rows, numbers: None)


def row_number_reused_before_the_drop_is_answered(patch):
    take_drops = RowIdAllocator.take_drops

    def take_and_reclaim(rows):
        dropped = take_drops(rows)
        for row in dropped:
            rows._free.append(row)
        return dropped

    patch.setattr(RowIdAllocator, "take_drops", take_and_reclaim)
    patch.setattr(RowIdAllocator, "reclaim", lambda rows, numbers: None)


def row_never_dropped(patch):
    patch.setattr(RowIdAllocator, "take_drops", lambda rows: [])


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
    """A row that may end with its tokens in flight is continued anyway."""
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
    def add_without_sharing(pinned, sequence, row, num_blocks):
        sequence.pinned = row.block_ids[:num_blocks]
        if sequence.pinned:
            pinned._sequences.append(sequence)

    patch.setattr(PinnedPrefixes, "add_sequence", add_without_sharing)


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
    patch.setattr(
        Planner, "_plan_drafts", lambda planner, plan, rows, room, shares: plan_drafts(planner, plan, rows, 9, shares)
    )


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
    pytest.param(prompt_logprobs_repeated_after_preemption, marks=pytest.mark.soak),
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
def test_reliability_figure_1_planted_bug_is_caught(explore, world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        explore(world_type, 10_000, 20, shrink=False)  # far fewer, as a rule


def others_run_beside_those_on_trial(patch):
    patch.setattr(CrashBisector, "may_run", lambda suspects, request_id: True)


def those_that_run_already_stay(patch):
    patch.setattr(Planner, "_isolate_suspects", lambda planner: None)


@pytest.mark.parametrize(
    "plant",
    [others_run_beside_those_on_trial, pytest.param(those_that_run_already_stay, marks=pytest.mark.soak)],
    ids=lambda plant: plant.__name__,
)
def test_reliability_figure_14_planted_bug_is_caught(explore, deadly_world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        explore(deadly_world_type, 500, 20, shrink=False)


def window_blocks_given_up_too_early(patch):
    pass_blocks = WindowBlocks.pass_blocks
    patch.setattr(WindowBlocks, "pass_blocks", lambda blocks, table, position: pass_blocks(blocks, table, position + 4))


def window_blocks_never_given_up(patch):
    patch.setattr(WindowBlocks, "pass_blocks", lambda blocks, table, position: None)


def prefix_without_its_window(patch):
    patch.setattr(WindowBlocks, "num_usable", lambda blocks, hashes, num_found: num_found)


def blocks_of_groups_exchanged(patch):
    find = WindowBlocks.find

    def find_exchanged(blocks, hashes, num_blocks):
        table = find(blocks, hashes, num_blocks)
        if not table.evicted:
            table.block_ids.reverse()
        return table

    patch.setattr(WindowBlocks, "find", find_exchanged)


def window_of_a_fork_not_held(patch):
    add_sequence = PinnedPrefixes.add_sequence

    def add_and_release(pinned, sequence, row, num_blocks):
        add_sequence(pinned, sequence, row, num_blocks)
        pinned._kv.pool.release(sequence.pinned_window.block_ids)

    patch.setattr(PinnedPrefixes, "add_sequence", add_and_release)


@pytest.mark.parametrize(
    "plant",
    [
        window_blocks_given_up_too_early,
        window_blocks_never_given_up,
        pytest.param(prefix_without_its_window, marks=pytest.mark.soak),
        blocks_of_groups_exchanged,
        window_of_a_fork_not_held,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bug_of_windows_is_caught(explore, windowed_world_type, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        explore(windowed_world_type, 1000, 20, shrink=False)
