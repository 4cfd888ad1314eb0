"""Spends a step's budget: which rows go on, which begin, and which must give way. Knows no events and no text.

Rows that decode come first, by a token each. Then whatever is behind its history, in order: rows that have begun and
rows that begin alike, by chunks. Whoever begins gets the blocks of its whole history at once, so chunks never want for
blocks: only a decoding row can, and then it takes them from a row that gives way. What is left of the budget is for
drafts, which take nothing from anybody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Chunk, Decode, RowBlocks, StepPlan, WorkerFacts, num_row_numbers
from penstock.scheduler.planning.pins import PinnedPrefixes
from penstock.scheduler.planning.preemption import PreemptionPolicy
from penstock.scheduler.planning.prefill_adder import MAX_OVERTAKEN, PrefillAdder, PrefillRound
from penstock.scheduler.planning.queues import RunningQueue, WaitingQueue
from penstock.scheduler.planning.restoring import HostTierRestorePolicy
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.sequence import RequestState, SequenceState, SequenceStatus
from penstock.scheduler.planning.tenants import TenantAccounting
from penstock.scheduler.policy import Rank
from penstock.scheduler.recovery.crash_bisector import CrashBisector
from penstock.scheduler.request import SpeculationCounts
from penstock.scheduler.timeline import Cause, lacked_blocks, made_room
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    """Positions computed in chunks, those of preempted rows included."""
    decode_rows: int = 0
    """Rows continued, over all steps."""
    preemptions: int = 0
    output_tokens: int = 0
    """Tokens chosen, those that are never shown included."""
    refused: int = 0
    """Requests that were not admitted."""
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


class Planned(NamedTuple):
    """A plan, and how much work it is."""

    plan: StepPlan
    work: StepWork


class Planner:
    """Owns rows and blocks, and who has them."""

    def __init__(
        self,
        kv: KVCacheManager,
        facts: WorkerFacts,
        config: SchedulerConfig,
        tenants: TenantAccounting,
        model: StepTimeModel,
        suspects: CrashBisector,
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.counters = Counters()
        self.running = RunningQueue()
        self.waiting = WaitingQueue(config.policy, kv.wanted, kv.block_size)
        self.rows: RowIdAllocator[SequenceState] = RowIdAllocator(num_row_numbers(facts.max_num_seqs))
        self.max_rows = 0
        self.budget = 0
        self.decode_kv = 0
        """Positions that the decoding rows of the last plan read."""
        self._facts = facts
        self._tenants = tenants
        self._model = model
        self._suspects = suspects
        self._clock = clock
        self._pins = PinnedPrefixes(kv, self.waiting.update_work)
        self.restoring = HostTierRestorePolicy(kv, model, facts)
        self.beginnings = PrefillAdder(
            kv, self.waiting, self.running, self.rows, self._pins, suspects, self.restoring, clock
        )
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Limits and policy are as ``config`` has them from the next plan on. Ranks must be right already."""
        self.budget = config.token_budget(self._facts)
        self.max_rows = self.beginnings.max_rows = config.max_rows(self._facts)
        # Every row that runs can decode in every step, so that none starves.
        assert 0 < self.max_rows <= self.budget
        self._target_itl_s = config.target_itl_s
        self._giving_way = PreemptionPolicy(config.policy, self.running, self.kv, self._tenants)
        self.waiting.arrange(config.policy)
        self.running.arrange()
        while len(self.running) > self.max_rows:
            self._preempt(max(self.running, key=lambda choice: choice.rank), "fewer rows may run")

    def plan(self) -> Planned | None:
        """The next step, or None if there is nothing to compute. The caller submits it: it counts as on its way."""
        self.kv.expire(self._clock())
        if self._suspects:
            self._leave_alone_those_on_trial()
        self._make_room()
        planned = self._plan()
        while planned.plan.is_empty and self._make_room():
            planned = self._plan()
        plan = planned.plan
        if plan.is_empty:
            return None
        plan.dropped = self.rows.say_drops()
        self.counters.steps += 1
        self.counters.decode_rows += len(plan.decodes)
        return planned

    def _plan(self) -> Planned:
        plan = StepPlan(self.counters.steps, [], [], [], [], [])
        drafting = self._plan_decodes(plan)
        budget = self.budget - len(plan.decodes)
        chunked: list[SequenceState] = []
        if self.running.prefilling or len(self.waiting):
            chunked = self._plan_chunks(plan, self._prefill_budget(plan, budget))
        if drafting:
            self._plan_drafts(plan, drafting, budget - sum(chunk.end - chunk.start for chunk in plan.chunks))
        self._close(plan, chunked)
        return Planned(plan, StepWork.of(plan, self.decode_kv))

    # What comes and goes --------------------------------------------------------------------------------------------

    def enter(self, choice: SequenceState) -> None:
        """Puts a new choice into the queue; a forked one keeps its blocks of the prompt while it waits."""
        self._pins.add_sequence(choice)
        self.waiting.put(choice)

    def retire(self, choice: SequenceState) -> None:
        """Ends a choice, wherever it is. Its blocks are free for the next plan, which drops its row."""
        if choice.state is SequenceStatus.WAITING:
            self.waiting.remove(choice)
            self._pins.remove(choice)
            self._say_left(choice)
        else:
            self._leave(choice)
        choice.state = SequenceStatus.ENDED

    def change_rank(self, choice: SequenceState, rank: Rank) -> None:
        """Moves a choice, wherever it is."""
        if choice.state is SequenceStatus.WAITING:
            self.waiting.remove(choice)
            choice.rank = rank
            self.waiting.put(choice)
        else:
            choice.rank = rank
            self.running.arrange()

    def hold(self, live: RequestState, held: bool) -> None:
        """Keeps a request out of the plans, or no longer; its rows keep their blocks until others want them."""
        for choice in live.choices:
            if choice.state not in (SequenceStatus.PREFILLING, SequenceStatus.DECODING):
                continue
            self.running.hold(choice, held)
            if choice.state is SequenceStatus.PREFILLING:
                # Nobody need wait for a prefix that is not being computed.
                (self.kv.retract if held else self.kv.announce)(choice, choice.hashes[choice.num_published :])
            if held:
                self._say_left(choice)
            elif choice.state is SequenceStatus.DECODING and not choice.is_pooled:
                live.timeline.decodes(choice.index, self.counters.steps)
        live.held = held

    def restart(self) -> None:
        """The worker is gone, with all KV, and with what was in flight: every row waits again."""
        waiting, begun = list(self.waiting), list(self.running)
        for choice in waiting:
            self.waiting.remove(choice)
        for choice in begun:
            self._say_left(choice)
            self.running.remove(choice)
        self.kv.reset()
        self._pins.drop_sequences()
        for choice in waiting + begun:
            choice.restart()
            self.waiting.put(choice)
        self.rows.clear()
        self.decode_kv = 0

    def end_of(self, choice: SequenceState) -> int:
        """The first step that a choice is not in."""
        return self.counters.steps if choice.complete_from is None else choice.complete_from

    def _say_left(self, choice: SequenceState) -> None:
        choice.live.timeline.left(choice.index, self.end_of(choice), choice.delivery.num_tokens)

    def _leave_alone_those_on_trial(self) -> None:
        """Every other row waits, and holds no blocks that they may want."""
        for choice in [choice for choice in self.running if not self.beginnings.may_run(choice.live)]:
            self._preempt(choice, "others are tried alone, to find out who ended the worker")

    def publish_confirmed(self, choice: SequenceState) -> None:
        """An answer confirmed the row's KV up to ``num_computed``."""
        num_full = choice.num_computed // self.kv.block_size
        if num_full > choice.num_published:
            self._publish(choice, num_full)

    # Rows that decode -----------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: StepPlan) -> list[tuple[int, SequenceState]]:
        """A token for each row; returns those that may have drafts, with their places in the plan."""
        rows = self._giving_way.rows_to_plan()  # a copy, since rows may give way meanwhile
        drafting: list[tuple[int, SequenceState]] = []
        decode_kv = 0
        for index, choice in enumerate(rows):
            if choice.state is not SequenceStatus.DECODING:
                continue  # it gave way
            # The worst case: every token in flight is accepted, and each of them is computed now.
            num_slots = choice.length_bound
            if num_slots < choice.length_limit:
                if num_slots > choice.capacity and not self._grow(plan, choice, num_slots, rows[index + 1 :]):
                    continue
                if choice.max_drafts:
                    drafting.append((len(plan.decodes), choice))
                plan.decodes.append(choice.decode)
                choice.in_flight.append(1)
                choice.length_bound += 1
                decode_kv += num_slots
            elif choice.complete_from is None:
                choice.complete_from = plan.step
        self.decode_kv = decode_kv
        return drafting

    def _plan_drafts(self, plan: StepPlan, drafting: list[tuple[int, SequenceState]], room: int) -> None:
        """Lets rows of the plan have drafts: those of all together have ``room``, and each has blocks for its own."""
        num_wanted = 0
        for index, choice in drafting:
            # A token is left for the next plan, which is made before this one is answered: so the row is in that plan
            # too, even if all of its drafts turn out wrong.
            num_left = choice.length_limit - choice.length_bound - 1
            num_drafts = self._hold_drafts(plan, choice, min(choice.max_drafts, num_left, room))
            if num_drafts > 0:
                plan.decodes[index] = Decode(choice.row, 1 + num_drafts)
                choice.in_flight[-1] += num_drafts
                choice.length_bound += num_drafts
                num_wanted += num_drafts
        plan.max_drafts = min(num_wanted, room)

    def _hold_drafts(self, plan: StepPlan, choice: SequenceState, num_drafts: int) -> int:
        """How many of these drafts the row's blocks hold beside the next plan's token, with new ones where there are
        plenty: tokens that are sure to come need some too, and would have to take them from somebody."""
        num_slots = choice.length_bound + num_drafts
        if num_slots <= choice.capacity:
            return num_drafts
        num_new = self.kv.num_blocks_for(num_slots) - len(choice.block_ids)
        if num_new + len(self.running) <= self.kv.pool.num_free and self._grow(plan, choice, num_slots, ()):
            return num_drafts
        return choice.capacity - choice.length_bound

    def _grow(
        self, plan: StepPlan, choice: SequenceState, num_slots: int, not_planned: Sequence[SequenceState]
    ) -> bool:
        """Gives a row the blocks that it needs, taking them from rows that give way; False if it was the last and gave
        way itself. ``not_planned``: the decoding rows that are not in the plan yet."""
        num_blocks = self.kv.num_blocks_for(num_slots)
        while (new := self.kv.grow(choice.block_ids, num_blocks)) is None:
            if self._pins.remove_all():
                continue
            victim = self._giving_way.victim_for_decode(choice, not_planned)
            needy = "it" if victim is choice else choice.live.request.request_id
            self._preempt(victim, lacked_blocks(needy, num_blocks - len(choice.block_ids)))
            if victim is choice:
                return False
        choice.capacity = num_blocks * self.kv.block_size
        plan.blocks.append(RowBlocks(choice.row, new))
        return True

    def _preempt(self, choice: SequenceState, why: str) -> None:
        live = choice.live
        self._leave(choice)
        choice.state = SequenceStatus.WAITING
        live.timings.preemptions += 1
        live.timeline.preempted(choice.index, self.counters.steps, why)
        self.counters.preemptions += 1
        self.waiting.put(choice)

    def _leave(self, choice: SequenceState) -> None:
        self._say_left(choice)
        self.running.remove(choice)
        self.kv.retract(choice, choice.hashes[choice.num_published :])
        self.kv.free(choice.block_ids)
        self.rows.free_row(choice.row)
        choice.leave_row()

    # Chunks of histories --------------------------------------------------------------------------------------------

    def _prefill_budget(self, plan: StepPlan, budget: int) -> int:
        """What is left of the step for chunks, so that whoever decodes beside them is not kept waiting."""
        if not plan.decodes or not budget:
            return budget
        context = self.running.prefilling[0].num_planned if self.running.prefilling else 0
        return self._model.max_prefill(len(plan.decodes), self.decode_kv, context, self._target_itl_s, budget)

    def _plan_chunks(self, plan: StepPlan, budget: int) -> list[SequenceState]:
        """Computes what is behind its history, in order; returns what got a chunk."""
        chunked: list[SequenceState] = []
        if not budget:
            self._say_spent()
            return chunked
        this_round, behind = PrefillRound(), self._behind()
        beginners = self.beginnings.schedulable(this_round)
        for choice in merge(behind, beginners, key=self.waiting.order) if len(self.waiting) else behind:
            if choice.state is SequenceStatus.WAITING:
                if not self.beginnings.try_add(plan, choice, this_round):
                    continue
                self._tenants.began(choice.live.tenant)
            budget -= self._plan_chunk(plan, choice, budget)
            chunked.append(choice)
            if not budget:
                self._say_spent()
                break
        return chunked

    def _say_spent(self) -> None:
        """Why whoever waits first does not begin."""
        first = next(self.waiting.in_order(), None)
        if first is not None:
            first.live.timeline.waits(first.index, Cause.BUDGET, self.budget)

    def _behind(self) -> list[SequenceState]:
        """Rows that have begun."""
        prefilling = self.running.prefilling
        return sorted(prefilling, key=self.waiting.order) if self.waiting.by_turns else prefilling.copy()

    def _plan_chunk(self, plan: StepPlan, choice: SequenceState, budget: int) -> int:
        start = choice.num_planned
        end = min(start + budget, choice.prefill_end)
        plan.chunks.append(Chunk(choice.row, start, end))
        num_sampled = int(end == choice.prefill_end and not choice.is_pooled)
        choice.num_planned = end
        choice.in_flight.append(num_sampled)
        choice.length_bound += num_sampled
        choice.live.tenant.charge(end - start)
        choice.live.timeline.prefilled(choice.index, plan.step, end - start)
        self.counters.prefill_tokens += end - start
        return end - start

    def _close(self, plan: StepPlan, chunked: list[SequenceState]) -> None:
        """The plan is whole. What follows it may read the KV that its chunks compute, but the plan itself may not."""
        for choice in chunked:
            self._publish(choice, choice.num_planned // self.kv.block_size)
            if choice.num_planned == choice.prefill_end:
                self.running.promote(choice)
                if not choice.is_pooled:
                    choice.live.timeline.will_decode(choice.index, plan.step)
        plan.copies_out, plan.copies_in = self.kv.take_copies()
        assert not plan.is_empty or not plan.copies_out + plan.copies_in, "an empty plan gives no blocks out"

    def _publish(self, choice: SequenceState, num_full: int) -> None:
        kv = self.kv
        kv.hashing.extend(choice.hashes, choice.token_ids, num_full, choice.live.request.hash_salt)
        start, choice.num_published = choice.num_published, num_full
        kv.publish(choice.block_ids, choice.hashes, start, num_full, choice.token_ids)
        if choice.state is SequenceStatus.PREFILLING:
            kv.retract(choice, choice.hashes[start:num_full])

    def would_make_room(self, tenant: str, rank: Rank) -> bool:
        """Whether a request that comes now gets the row and the blocks of one that runs."""
        waiting = self.waiting
        num_own = waiting.queued_of(tenant).requests if waiting.by_turns else waiting.num_ahead(tenant, rank)
        return not num_own and self._giving_way.would_make_room(tenant, rank, self.max_rows)

    def _make_room(self) -> bool:
        """Has a row give way to whoever waits first and finds no room; False if none has to."""
        if not self._giving_way.makes_room:
            return False
        choice = self.beginnings.first_without_room()
        if choice is None:
            return False
        victim = self._giving_way.victim_for_waiting(choice, self.beginnings.num_missing_for(choice), self.max_rows)
        if victim is None:
            return False
        choice.num_overtaken = MAX_OVERTAKEN  # what is freed is for nobody else
        self._preempt(victim, made_room(choice.live.request.request_id))
        return True
