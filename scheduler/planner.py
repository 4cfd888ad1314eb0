"""Spends a step's budget: which rows go on, which begin, and which must give way. Knows no events and no text.

Rows that decode come first, then chunks of histories, then rows that begin; each in order of rank. Whoever begins gets
the blocks of its whole history at once, so chunks never want for blocks: only a decoding row can, and then it takes
them from the lowest rank that runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.choice import Choice, ChoiceState, LiveRequest
from penstock.scheduler.lineup import RunningRows, WaitingQueue
from penstock.scheduler.plan import AddedRow, Chunk, Decode, RowBlocks, SamplingParams, StepPlan, num_row_numbers
from penstock.scheduler.rows import RowTable

MAX_ADDED_TOKENS = 1 << 18
"""History of the rows that begin in one plan, unless it is one row's: bounds the loop's time for a plan."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    """Positions computed in chunks, those of preempted rows included."""
    cached_tokens: int = 0
    """Positions that the prefix cache saved."""
    decode_rows: int = 0
    """Rows continued, over all steps."""
    preemptions: int = 0
    output_tokens: int = 0
    """Tokens chosen, those that are never shown included."""


class Planner:
    """Owns rows and blocks, and who has them."""

    def __init__(
        self,
        kv: KVCacheManager,
        budget: int,
        max_rows: int,
        max_decode_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        # Every row that runs can decode in every step, so that none starves, and chunks always go on.
        assert 0 < max_rows * max_decode_tokens <= budget
        self.kv = kv
        self.counters = Counters()
        self.waiting = WaitingQueue()
        self.running = RunningRows()
        self.rows: RowTable[Choice] = RowTable(num_row_numbers(max_rows))
        self._budget = budget
        self._max_rows = max_rows
        self._max_decode_tokens = max_decode_tokens
        self._clock = clock
        # A row that begins leaves so many blocks to those that run, or it would often be preempted at once.
        self._reserved_blocks = kv.pool.num_blocks // 100
        self._pinned: list[Choice] = []

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. The caller submits it: it counts as on its way."""
        plan = StepPlan(self.counters.steps, [], [], [], [], [])
        budget = self._plan_decodes(plan, self._budget)
        chunked: list[Choice] = []
        for choice in self.running.prefilling:
            if not budget:
                break
            budget -= self._plan_chunk(plan, choice, budget)
            chunked.append(choice)
        self._plan_beginnings(plan, budget, chunked)
        if plan.is_empty:
            return None
        plan.dropped = self.rows.say_drops()
        self._close(chunked)
        self.counters.steps += 1
        self.counters.decode_rows += len(plan.decodes)
        return plan

    def pin(self, choice: Choice) -> None:
        """Enters a forked choice, which keeps its blocks of the prompt while it waits."""
        if choice.pinned:
            self.kv.share(choice.pinned)
            self._pinned.append(choice)
        self.waiting.put(choice)

    def retire(self, choice: Choice) -> None:
        """Ends a choice, wherever it is. Its blocks are free for the next plan, which drops its row."""
        if choice.state is ChoiceState.WAITING:
            self.waiting.remove(choice)
            self._unpin(choice)
        else:
            self._leave(choice)
        choice.state = ChoiceState.ENDED

    def publish_confirmed(self, choice: Choice) -> None:
        """An answer confirmed the row's KV up to ``num_computed``."""
        num_full = choice.num_computed // self.kv.block_size
        if num_full > choice.num_published:
            self._publish(choice, num_full)

    # Rows that decode ---------------------------------------------------------------------------------------------

    def _plan_decodes(self, plan: StepPlan, budget: int) -> int:
        decoding = self.running.decoding
        max_decode_tokens = self._max_decode_tokens
        index = 0
        while index < len(decoding):
            choice = decoding[index]
            num_tokens = choice.length_limit - choice.length_bound
            if num_tokens > 0:
                num_tokens = min(num_tokens, max_decode_tokens)
                # The worst case: every token in flight and every draft but the last is accepted, and computed.
                num_slots = choice.length_bound + num_tokens - 1
                if num_slots > choice.capacity and not self._grow(plan, choice, num_slots):
                    continue
                plan.decodes.append(choice.decode if num_tokens == 1 else Decode(choice.row, num_tokens))
                choice.in_flight.append(num_tokens)
                choice.length_bound += num_tokens
                budget -= num_tokens
            index += 1
        return budget

    def _grow(self, plan: StepPlan, choice: Choice, num_slots: int) -> bool:
        """Gives a row the blocks that it needs, taking them from lower ranks; False if it was the lowest and gave way.

        Rows are planned in order of rank, so whoever gives way is not in the plan yet.
        """
        num_blocks = self.kv.num_blocks_for(num_slots)
        while (new := self.kv.grow(choice.block_ids, num_blocks)) is None:
            if self._unpin_all():
                continue
            last = self.running.last()
            self._preempt(last)
            if last is choice:
                return False
        choice.capacity = num_blocks * self.kv.block_size
        plan.blocks.append(RowBlocks(choice.row, new))
        return True

    def _preempt(self, choice: Choice) -> None:
        self._leave(choice)
        choice.state = ChoiceState.WAITING
        choice.live.timings.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.put(choice)

    def _leave(self, choice: Choice) -> None:
        self.running.remove(choice)
        self.kv.retract(choice, choice.hashes[choice.num_published :])
        self.kv.free(choice.block_ids)
        self.rows.drop(choice.row)
        choice.leave_row()

    # Chunks of histories ------------------------------------------------------------------------------------------

    def _plan_chunk(self, plan: StepPlan, choice: Choice, budget: int) -> int:
        start = choice.num_planned
        end = min(start + budget, choice.prefill_end)
        plan.chunks.append(Chunk(choice.row, start, end))
        num_sampled = int(end == choice.prefill_end)
        choice.num_planned = end
        choice.in_flight.append(num_sampled)
        choice.length_bound += num_sampled
        self.counters.prefill_tokens += end - start
        return end - start

    def _close(self, chunked: list[Choice]) -> None:
        """The plan is whole. What follows it may read the KV that its chunks compute, but the plan itself may not."""
        for choice in chunked:
            self._publish(choice, choice.num_planned // self.kv.block_size)
            if choice.num_planned == choice.prefill_end:
                self.running.promote(choice)

    def _publish(self, choice: Choice, num_full: int) -> None:
        kv = self.kv
        kv.hashing.extend(choice.hashes, choice.token_ids, num_full, choice.live.request.hash_salt)
        start, choice.num_published = choice.num_published, num_full
        kv.publish(choice.block_ids, choice.hashes, start, num_full)
        if choice.state is ChoiceState.PREFILLING:
            kv.retract(choice, choice.hashes[start:num_full])

    # Rows that begin ----------------------------------------------------------------------------------------------

    def _plan_beginnings(self, plan: StepPlan, budget: int, chunked: list[Choice]) -> None:
        waiting = self.waiting.choices
        index = num_added = 0
        while budget and index < len(waiting) and len(self.running) < self._max_rows and self.rows.num_free:
            choice = waiting[index]
            num_added += len(choice.token_ids)
            if plan.added and num_added > MAX_ADDED_TOKENS:
                break
            if choice.awaited_hash is not None and self.kv.is_pending(choice.awaited_hash):
                index += 1  # somebody computes its prefix; whoever is behind need not wait for that
                continue
            if choice.in_flight:
                break  # preempted, and its newest plan is not answered
            if len(self.running) and self.kv.pool.num_free <= choice.num_free_at_last_try:
                break  # nothing was freed since the last try, so looking up a long prefix again is no use
            prefix = self._prefix(choice)
            if prefix is None:
                index += 1
                continue
            block_ids = self._allocate(choice, prefix)
            if block_ids is None:
                choice.num_free_at_last_try = self.kv.pool.num_free
                break  # nobody overtakes it, or it might never find room
            self._begin(plan, choice, block_ids, len(prefix))
            budget -= self._plan_chunk(plan, choice, budget)
            chunked.append(choice)

    def _prefix(self, choice: Choice) -> list[int] | None:
        """Blocks with KV of the history's beginning; None if it is better to wait for more."""
        if choice.pinned:
            return choice.pinned
        if choice.index == 0 and choice.live.wants_prompt_logprobs:
            return []  # they come from computing the prompt
        kv = self.kv
        num_tokens = len(choice.token_ids)
        kv.hashing.extend(choice.hashes, choice.token_ids, num_tokens // kv.block_size, choice.live.request.hash_salt)
        prefix = kv.find_prefix(choice.hashes, num_tokens)
        choice.awaited_hash = kv.last_pending(choice.hashes, len(prefix), num_tokens)
        return None if choice.awaited_hash is not None else prefix

    def _allocate(self, choice: Choice, prefix: list[int]) -> list[int] | None:
        num_tokens = len(choice.token_ids)
        if len(self.running):
            return self.kv.allocate(prefix, num_tokens, self._reserved_blocks)
        block_ids = self.kv.allocate(prefix, num_tokens)
        if block_ids is None and self._unpin_all(but=choice):
            block_ids = self.kv.allocate(prefix, num_tokens)
        assert block_ids is not None, "a request that fits alone finds no room although nothing runs"
        return block_ids

    def _begin(self, plan: StepPlan, choice: Choice, block_ids: list[int], num_cached_blocks: int) -> None:
        live = choice.live
        self.waiting.remove(choice)
        self._unpin(choice)
        num_cached = num_cached_blocks * self.kv.block_size
        if live.started_at is None:
            live.started_at = self._clock()
            live.usage.cached_tokens = num_cached
        self.counters.cached_tokens += num_cached
        row, epoch = self.rows.take(choice)
        choice.begin(row, epoch, block_ids, num_cached_blocks, self.kv.block_size)
        self.running.add(choice)
        self.kv.announce(choice, choice.hashes[num_cached_blocks:])
        plan.added.append(
            AddedRow(
                row,
                epoch,
                choice.token_ids.copy(),
                choice.num_prompt_tokens,
                num_cached,
                block_ids.copy(),
                _sampling_of_row(choice, live),
            )
        )

    # Blocks that forked choices keep ------------------------------------------------------------------------------

    def _unpin(self, choice: Choice) -> None:
        if choice.pinned:
            self.kv.free(choice.pinned)
            choice.pinned = []
            self._pinned.remove(choice)

    def _unpin_all(self, but: Choice | None = None) -> bool:
        """Forked choices that wait give up their blocks, to find them cached or compute them; False if none has any."""
        victims = [choice for choice in self._pinned if choice is not but]
        for choice in victims:
            self._unpin(choice)
        return bool(victims)


def _sampling_of_row(choice: Choice, live: LiveRequest) -> SamplingParams:
    """What was reported of the prompt's log-probabilities is not computed again."""
    if choice.sampling.prompt_logprobs is not None and not live.wants_prompt_logprobs:
        return replace(choice.sampling, prompt_logprobs=None)
    return choice.sampling
