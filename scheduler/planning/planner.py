"""Spends a step's token budget: which rows continue, which sequences begin, and which rows are preempted. It does not
know events or text.

Decoding rows come first, with one token each. Then come histories that are not computed yet, in order and in chunks,
for rows that have begun and for new ones alike. A sequence gets the blocks of its whole history when it begins, so
chunks never lack blocks. Only a decoding row can lack them, and takes them from a row that is preempted. The rest of
the budget is for drafts, which never take anything from other rows.
"""

from collections import deque
from collections.abc import Callable, Container
from heapq import merge

from penstock.scheduler.plan import Chunk, Decode, RowBlocks, StepPlan
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.planning.pinned_prefixes import PinnedPrefixes
from penstock.scheduler.planning.preemption import PreemptionPolicy
from penstock.scheduler.planning.prefill_adder import MAX_OVERTAKEN, PrefillAdder, PrefillRound
from penstock.scheduler.planning.restore_policy import HostTierRestorePolicy
from penstock.scheduler.planning.row_states import RowStates
from penstock.scheduler.planning.sequence import RequestState, SequenceState, SequenceStatus
from penstock.scheduler.planning.step_shares import StepShares, prefill_budget
from penstock.scheduler.policy import Rank
from penstock.scheduler.timeline_entry import PreemptionCause, PreemptionDetail, WaitCause
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork


class Planner:
    """Owns the rows and blocks, and assigns them."""

    def __init__(self, context: PlanningContext, model: StepTimeModel, is_late: Callable[[RequestState], bool]) -> None:
        """``is_late`` returns whether a request that has not begun can no longer meet its deadline."""
        self.kv, self.waiting, self.running, self.rows = context.kv, context.waiting, context.running, context.rows
        self.counters = context.counters
        self._context = context
        self._model = model
        measured_steps = context.facts.measured_steps
        self._base_s = min((step.computed_us * 1e-6 for step in measured_steps if step.decodes), default=0.0)
        """About how long a step takes without any row: as long as the shortest one that was measured at the start."""
        self._pinned = PinnedPrefixes(self.kv, self.waiting.unpinned)
        self.restore_policy = HostTierRestorePolicy(self.kv, model, context.facts)
        self.states = RowStates(self.kv, self.counters)
        self.prefill_adder = PrefillAdder(context, self._pinned, self.restore_policy, self.states, is_late)
        self._preemption = PreemptionPolicy(context.config.policy, context)

    def reconfigure(self) -> None:
        """Applies the limits and the policy of the planning context from the next plan on. Ranks must be updated
        before."""
        self._preemption = PreemptionPolicy(self._context.config.policy, self._context)
        self.waiting.arrange(self._context.config.policy)
        self.running.arrange()
        while len(self.running) > self._context.max_rows:
            last = max(self.running, key=lambda sequence: sequence.rank)
            self._preempt(last, PreemptionDetail(PreemptionCause.FEWER_ROWS))

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to compute. The caller must submit it: it counts as in
        flight."""
        self.kv.pool.expire(self._context.clock())
        if self._context.bisector:
            self._isolate_suspects()
        self._make_room()
        num_before, plan = self.counters.preemptions, self._plan()
        # With stages, a row may have been preempted in its turn while others could continue.
        while plan.is_empty and (self._make_room() or self.counters.preemptions > num_before or self._free_for_chunk()):
            num_before, plan = self.counters.preemptions, self._plan()
        if plan.is_empty:
            return None
        plan.dropped = self.rows.take_drops()
        self.counters.steps += 1
        self.counters.decode_rows += len(plan.decodes)
        return plan

    def _plan(self) -> StepPlan:
        plan = StepPlan(self.counters.steps, [], [], [], [], [])
        rows = self._preemption.rows_to_plan(plan.step)
        shares = self._step_shares(plan.step, rows)
        drafting = self._plan_decodes(plan, deque(rows), () if shares is None else shares.sitting_out)
        budget = self._context.budget - len(plan.decodes)
        chunked: list[SequenceState] = []
        if self.running.prefilling or len(self.waiting):
            chunked = self._plan_chunks(plan, budget, shares)
        if drafting:
            self._plan_drafts(plan, drafting, budget - sum(chunk.end - chunk.start for chunk in plan.chunks), shares)
        self._close(plan, chunked)
        return plan

    def enter(self, sequence: SequenceState, forked_from: SequenceState | None = None) -> None:
        """Puts a new sequence into the queue. A forked one keeps its blocks of the prompt while it waits."""
        if forked_from is not None and self.states.pins_blocks:
            num_shared = (forked_from.num_prompt_tokens - 1) // self.kv.block_size
            self._pinned.add_sequence(sequence, forked_from, num_shared)
        self.waiting.put(sequence)

    def retire(self, sequence: SequenceState) -> None:
        """Ends a sequence in any state. Its blocks are free for the next plan, which drops its row."""
        if sequence.state is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self._pinned.remove(sequence)
            self._record_left(sequence)
        else:
            self._leave(sequence)
        sequence.state = SequenceStatus.ENDED

    def suspend(self, sequence: SequenceState) -> None:
        """Takes a sequence out of its row, to wait with the blocks that it has computed; without them if it is held, or
        has a recurrent state."""
        if self.states.pins_blocks and not sequence.live.held:
            self._pinned.add_sequence(sequence, sequence, sequence.num_computed // self.kv.block_size)
        self._leave(sequence)
        sequence.state = SequenceStatus.WAITING
        self.waiting.put(sequence)

    def inject(self, sequence: SequenceState) -> int:
        """Puts tokens into the history of a waiting sequence; returns their number."""
        self.waiting.remove(sequence)
        num_tokens = sequence.inject()
        self.waiting.put(sequence)
        return num_tokens

    def change_rank(self, sequence: SequenceState, rank: Rank) -> None:
        """Changes the rank of a sequence in any state."""
        if sequence.state is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            sequence.rank = rank
            self.waiting.put(sequence)
        else:
            sequence.rank = rank
            self.running.arrange()

    def hold(self, live: RequestState, held: bool) -> None:
        """Starts or stops keeping a request out of the plans. Its rows keep their blocks until others need them; its
        waiting sequences give theirs up."""
        for sequence in live.sequences:
            if held and sequence.state is SequenceStatus.WAITING:
                self._pinned.take(sequence)
            if sequence.state not in (SequenceStatus.PREFILLING, SequenceStatus.DECODING):
                continue
            self.running.hold(sequence, held)
            if sequence.state is SequenceStatus.PREFILLING:
                # No sequence must wait for a prefix that is not being computed.
                (self.kv.retract if held else self.kv.announce)(sequence, sequence.hashes[sequence.num_published :])
            if held:
                self.states.retract(sequence)
                self._record_left(sequence)
            elif sequence.state is SequenceStatus.DECODING and not sequence.is_pooled:
                live.timeline.decodes(sequence.index, self.counters.steps)
        live.held = held

    def restart(self) -> None:
        """Makes every row wait again: the worker is gone, with all KV and with the plans in flight."""
        waiting, begun = list(self.waiting), list(self.running)
        for sequence in waiting:
            self.waiting.remove(sequence)
        for sequence in begun:
            self._record_left(sequence)
            self.running.remove(sequence)
        self.kv.reset()
        self._pinned.drop_sequences()
        for sequence in waiting + begun:
            sequence.restart()
            self.waiting.put(sequence)
        self.rows.clear()
        self._context.decode_kv = 0

    def end_of(self, sequence: SequenceState) -> int:
        """Returns the first step that does not include the sequence."""
        return self.counters.steps if sequence.complete_from is None else sequence.complete_from

    def _record_left(self, sequence: SequenceState) -> None:
        sequence.live.timeline.left(sequence.index, self.end_of(sequence), sequence.output.num_tokens)

    def _isolate_suspects(self) -> None:
        """Preempts every row that is not on trial, so that it holds no blocks that the rows on trial may need."""
        may_run = self._context.bisector.may_run
        for sequence in [row for row in self.running if not may_run(row.live.request.request_id)]:
            self._preempt(sequence, PreemptionDetail(PreemptionCause.SUSPECT))

    def _step_shares(self, step: int, rows: list[SequenceState]) -> StepShares | None:
        """Returns the tenants' shares of a step that may continue these rows; None if tenants have none."""
        if not self.waiting.by_turns:
            return None
        decoding = [row for row in rows if row.length_bound < row.length_limit]
        costs = self._model.decode_costs(len(decoding), sum(row.length_bound for row in decoding), self._base_s)
        return StepShares(step, decoding, costs, self._base_s)

    def _plan_decodes(
        self, plan: StepPlan, unplanned: deque[SequenceState], sitting_out: Container[SequenceState]
    ) -> list[tuple[int, SequenceState]]:
        """Plans a token for each of these rows that does not sit the step out and is not preempted meanwhile; returns
        the rows that may have drafts, with their positions in the plan."""
        drafting: list[tuple[int, SequenceState]] = []
        decode_kv = 0
        while unplanned:
            sequence = unplanned.popleft()
            if sequence in sitting_out:
                self.counters.rows_sat_out += 1
                continue
            # The worst case: every token in flight is accepted, and each of them is computed now.
            num_slots = sequence.length_bound
            if num_slots < sequence.length_limit:
                if num_slots > sequence.capacity and not self._grow(plan, sequence, num_slots, unplanned):
                    continue
                if sequence.max_drafts:
                    drafting.append((len(plan.decodes), sequence))
                plan.decodes.append(sequence.decode)
                sequence.in_flight.append(1)
                sequence.planned_at = plan.step
                sequence.length_bound += 1
                decode_kv += num_slots
            elif sequence.complete_from is None:
                sequence.complete_from = plan.step
        self._context.decode_kv = decode_kv
        return drafting

    def _plan_drafts(
        self, plan: StepPlan, drafting: list[tuple[int, SequenceState]], room: int, shares: StepShares | None
    ) -> None:
        """Lets rows of the plan have drafts: at most ``room`` in total, and for each row as many as its blocks hold."""
        num_wanted = 0
        for index, sequence in drafting:
            # Leaves a token for the next plan, which is made before the result of this one. So the row is in that plan
            # too, even if all of its drafts are rejected.
            num_left = sequence.length_limit - sequence.length_bound - 1
            num_drafts = min(sequence.max_drafts, num_left, room)
            if shares is not None and num_drafts > 0:
                num_drafts = shares.take_drafts(sequence.live.tenant, num_drafts)
            num_drafts = self._hold_drafts(plan, sequence, num_drafts)
            if num_drafts > 0:
                plan.decodes[index] = Decode(sequence.row, 1 + num_drafts)
                sequence.in_flight[-1] += num_drafts
                sequence.length_bound += num_drafts
                num_wanted += num_drafts
                if sequence.repetition is not None and sequence.repetition.is_found:
                    plan.repeating.append(sequence.row)
        plan.max_drafts = min(num_wanted, room)

    def _hold_drafts(self, plan: StepPlan, sequence: SequenceState, num_drafts: int) -> int:
        """Returns how many of these drafts the row's blocks hold beside the next plan's token. It gets new blocks only
        if there are plenty: tokens that are certain to come need some too, and would have to preempt a row for them."""
        num_slots = sequence.length_bound + num_drafts
        if num_slots <= sequence.capacity:
            return num_drafts
        num_new = (self.kv.num_blocks_for(num_slots) - len(sequence.block_ids)) * self.kv.windows.groups.num_groups
        if num_new + len(self.running) <= self.kv.pool.num_free and self._grow(plan, sequence, num_slots, deque()):
            return num_drafts
        return sequence.capacity - sequence.length_bound

    def _grow(self, plan: StepPlan, sequence: SequenceState, num_slots: int, unplanned: deque[SequenceState]) -> bool:
        """Gives a row the blocks that it needs, preempting other rows for them; returns False if the row was the last
        and was preempted itself. ``unplanned``: the decoding rows that are not in the plan yet; those that are
        preempted are removed from it."""
        num_blocks, window = self.kv.num_blocks_for(num_slots), sequence.window
        # If a mask is late, the last token of a history is computed again.
        self.kv.windows.pass_blocks(window, max(sequence.num_computed, sequence.prefill_end - 1))
        num_of_window = len(window.block_ids)
        while (new := self.kv.grow(sequence.block_ids, num_blocks, window)) is None:
            if self._pinned.remove_all():
                continue
            victim = self._preemption.victim_for_decode(sequence, unplanned)
            if victim in unplanned:
                unplanned.remove(victim)
            request_id, num_lacking = sequence.live.request.request_id, num_blocks - len(sequence.block_ids)
            self._preempt(victim, PreemptionDetail(PreemptionCause.BLOCKS, request_id, num_lacking))
            if victim is sequence:
                return False
        sequence.capacity = num_blocks * self.kv.block_size
        plan.blocks.append(RowBlocks(sequence.row, new, window.block_ids[num_of_window:]))
        return True

    def _preempt(self, sequence: SequenceState, why: PreemptionDetail) -> None:
        live = sequence.live
        self._leave(sequence)
        sequence.state = SequenceStatus.WAITING
        live.timings.preemptions += 1
        live.timeline.preempted(sequence.index, self.counters.steps, why)
        self.counters.preemptions += 1
        self.waiting.put(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self._record_left(sequence)
        self.running.remove(sequence)
        self.kv.retract(sequence, sequence.hashes[sequence.num_published :])
        self.states.end_row(sequence)
        self.kv.release(sequence.block_ids, sequence.window)
        self.rows.free_row(sequence.row)
        sequence.leave_row()

    def _plan_chunks(self, plan: StepPlan, budget: int, shares: StepShares | None) -> list[SequenceState]:
        """Plans chunks of histories, in order; returns the sequences that got one."""
        chunked: list[SequenceState] = []
        budget = prefill_budget(self._context, self._model, len(plan.decodes), budget)
        if not budget:
            self._record_spent()
            return chunked
        this_round, behind = PrefillRound(), self._behind()
        beginners = self.prefill_adder.schedulable(this_round)
        for sequence in merge(behind, beginners, key=self.waiting.order) if len(self.waiting) else behind:
            tenant = sequence.live.tenant
            if shares is not None and shares.has_its_chunks(tenant):
                continue
            if sequence.state is SequenceStatus.WAITING:
                if not self.prefill_adder.try_add(plan, sequence, this_round):
                    continue
                self._context.tenants.last = tenant
            most = budget
            if shares is not None:
                decodes = StepWork(0, 0, len(plan.decodes), self._context.decode_kv)
                most = shares.take_chunk(sequence, budget, decodes, self._model)
            end = min(sequence.num_planned + most, sequence.prefill_end)
            new, end = self.kv.windows.hold_chunk(sequence.window, end)
            if new:
                plan.blocks.append(RowBlocks(sequence.row, [], new))
            if end == sequence.num_planned:
                this_round.is_over = True  # no other row gets the blocks that it lacks
                continue
            budget -= self._plan_chunk(plan, sequence, end)
            chunked.append(sequence)
            if shares is not None and shares.has_its_chunks(tenant):
                this_round.tenants_over.add(tenant)
            if not budget:
                self._record_spent()
                break
        return chunked

    def _record_spent(self) -> None:
        """Records why the first waiting sequence does not begin."""
        first = next(self.waiting.in_order(), None)
        if first is not None:
            first.live.timeline.waits(first.index, WaitCause.BUDGET, self._context.budget)

    def _behind(self) -> list[SequenceState]:
        """Returns the rows whose histories are not computed yet."""
        prefilling = self.running.prefilling
        return sorted(prefilling, key=self.waiting.order) if self.waiting.by_turns else prefilling.copy()

    def _plan_chunk(self, plan: StepPlan, sequence: SequenceState, end: int) -> int:
        start = sequence.num_planned
        plan.chunks.append(Chunk(sequence.row, start, end))
        num_sampled = int(end == sequence.prefill_end and not sequence.is_pooled)
        sequence.num_planned = end
        sequence.in_flight.append(num_sampled)
        sequence.planned_at = plan.step
        sequence.length_bound += num_sampled
        sequence.live.tenant.charge(end - start)
        sequence.live.timeline.prefilled(sequence.index, plan.step, end - start)
        self.counters.prefill_tokens += end - start
        return end - start

    def _close(self, plan: StepPlan, chunked: list[SequenceState]) -> None:
        """Completes the plan. Later plans may read the KV that its chunks compute, but the plan itself may not."""
        for sequence in chunked:
            self.publish(sequence, sequence.num_planned // self.kv.block_size)
            self.kv.windows.pass_blocks(sequence.window, sequence.num_planned - 1)
            if sequence.num_planned == sequence.prefill_end:
                self.running.promote(sequence)
                if not sequence.is_pooled:
                    sequence.live.timeline.will_decode(sequence.index, plan.step)
        self.states.save(plan, chunked, (self.rows.current(decode.row) for decode in plan.decodes))
        plan.copies_out, plan.copies_in = self.kv.take_copies()
        assert not plan.is_empty or not plan.copies_out + plan.copies_in, "an empty plan gives no blocks out"

    def publish(self, sequence: SequenceState, num_full: int) -> None:
        """Publishes the first ``num_full`` blocks of a row."""
        kv = self.kv
        kv.extend_hashes(sequence.hashes, sequence.token_ids, num_full, sequence.live.request.hash_salt)
        start, sequence.num_published = sequence.num_published, num_full
        origin = sequence.live.origin
        kv.publish(sequence.block_ids, sequence.hashes, start, num_full, sequence.token_ids, origin, sequence.window)
        if sequence.state is SequenceStatus.PREFILLING:
            kv.retract(sequence, sequence.hashes[start:num_full])

    def would_make_room(self, tenant: str, rank: Rank) -> bool:
        """Returns whether a request that arrives now would get the row and the blocks of a running one."""
        return not self.waiting.num_own_ahead(tenant, rank) and self._preemption.would_make_room(tenant, rank)

    def _free_for_chunk(self) -> bool:
        """Gives blocks of windowed groups to histories of which an empty plan computes nothing for lack of them;
        returns False if none lacks them, or if there is no row to preempt."""
        if not self.running.prefilling or not self.kv.windows.groups.num_windowed:
            return False
        if self._pinned.remove_all():
            return True
        victim, first = self._preemption.victim_for_chunk(), self._behind()[0]
        if victim is not None:
            self._preempt(victim, PreemptionDetail(PreemptionCause.BLOCKS, first.live.request.request_id))
        return victim is not None

    def _make_room(self) -> bool:
        """Preempts a row for a waiting sequence that finds no room; returns False if there is none to preempt."""
        if not self._preemption.makes_room:
            return False
        for sequence in self.prefill_adder.without_room():
            victim = self._preemption.victim_for_waiting(sequence, self.prefill_adder.num_missing_for(sequence))
            if victim is not None:
                sequence.num_overtaken = MAX_OVERTAKEN  # what is freed is only for this sequence
                self._preempt(victim, PreemptionDetail(PreemptionCause.ORDER, sequence.live.request.request_id))
                return True
        return False
