"""Compiles the grammars of a worker's rows while steps run, and computes the token masks while the layers run.

A step waits for a mask no longer than its budget (``mask_round``). A row whose mask is late sits out: it gets no token
until the mask is computed. The masks of a grammar that was slow recently are computed in the background, and its rows
are in a batch only when their masks are computed."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from llguidance import LLTokenizer

from penstock.models.batch.grammar_matcher import CompiledGrammar, GrammarMatcher
from penstock.models.batch.rows import Row
from penstock.models.batch.sampled_positions import GrammarBitmasks, SampledPosition
from penstock.models.speculative.drafter import Wanted
from penstock.models.structured_output.compiler import compile_grammar, forces_tokens, read_tokenizer
from penstock.models.structured_output.mask_lanes import BackgroundLane, StepLane, WorkerThread
from penstock.models.structured_output.mask_round import MaskRound
from penstock.models.structured_output.mask_work import MaskTools, RowWork
from penstock.scheduler.worker_config import WorkerConfig

MAX_COMPILED, MAX_COMPILED_BYTES = 32, 512 << 10
"""The number of compiled grammars that are cached, and the limit on their texts: one takes up to 400 times as much."""
MAX_THREADS = 4
"""The maximum number of threads that compute the masks of one batch. On a CPU they take cores from the layers."""

METERED_S = 0.002
"""The shortest time for forced tokens that is charged to a row."""


class StructuredOutputManager:
    """Creates the matchers of rows and the masks of batches.

    All methods except ``is_ready`` are called by one thread.
    """

    def __init__(
        self,
        read: Callable[[], LLTokenizer],
        vocab_size: int,
        puts_off: bool = True,
        ends_slow_rows: bool = True,
        num_ids: int | None = None,
    ) -> None:
        """``read`` creates the tokenizer. It is called at once on another thread, because it takes a second for a large
        vocabulary. Tokens from ``vocab_size`` on are never allowed: the model does not have them. ``num_ids`` is the
        tokenizer's number of ids; None means the model's."""
        self.puts_off = puts_off
        """Whether a row whose grammar or mask is late gets its token in a later step. If not, its step waits."""
        self._vocab_size = vocab_size
        self._ends_slow_rows = ends_slow_rows
        self._compiling = WorkerThread("grammars")
        self._lane = StepLane()
        self._background = BackgroundLane()
        self._changed = threading.Condition()
        self._tokenizer: Future[LLTokenizer] = self._compiling.submit(read)
        self._tools: Future[MaskTools] = self._compiling.submit(self._make_tools)
        self._num_words = -(-(num_ids or vocab_size) // 32)
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        """Grammars by tenant and text, so that tenants do not wait for each other's rows."""
        self._num_bytes = 0
        """The length of these texts together."""

    def _make_tools(self) -> MaskTools:
        num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        return MaskTools(self._tokenizer.result(), num_threads, self._vocab_size, ends_slow_rows=self._ends_slow_rows)

    def matcher(self, grammar: str, num_prompt_tokens: int, tenant: str = "") -> GrammarMatcher:
        """Returns the matcher of a new row. Starts to compile the grammar unless it is cached."""
        key = tenant, grammar
        compiled = self._compiled.get(key)
        if compiled is None:
            compiling = self._compiling.submit(lambda: compile_grammar(self._tokenizer.result(), grammar))
            compiling.add_done_callback(lambda _: self._notify())
            compiled = self._compiled[key] = CompiledGrammar(
                compiling, forces=forces_tokens(grammar), puts_off=self.puts_off
            )
            self._num_bytes += len(grammar)
            while len(self._compiled) > MAX_COMPILED or (
                self._num_bytes > MAX_COMPILED_BYTES and len(self._compiled) > 1
            ):
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(oldest)
        self._compiled.move_to_end(key)
        return GrammarMatcher(compiled, num_prompt_tokens, self._vocab_size)

    # Rows that sit out -----------------------------------------------------------------------------------------------

    def is_ready(self, row: Row, known: threading.Event) -> bool:
        """Whether the row may be in the next batch. If not, its mask is computed in the background. ``known`` is set
        when all of its history is known."""
        matcher, end = row.matcher, len(row.history)
        if matcher is None or not self.puts_off or matcher.failure:
            return True
        if matcher.is_pending:
            self._lane.relieve()
            return False
        if matcher.library is None and not matcher.grammar.matcher.done():
            return False
        if not (matcher.grammar.is_apart or matcher.is_behind(end)) or matcher.is_ready(end):
            return True
        self._add_to_background(row, end, known)
        return False

    def _add_to_background(self, row: Row, end: int, known: threading.Event) -> None:
        assert row.matcher is not None
        row.matcher.is_pending = True
        self._background.add_work(RowWork(row, end, known, self._found, self._tools))

    def wait_ready(self, rows: Sequence[Row], known: threading.Event, timeout_s: float) -> None:
        """Waits until one of the rows may be in a batch, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: any(self.is_ready(row, known) for row in rows), timeout_s)

    def _found(self, work: RowWork) -> None:
        """Called when the mask of a row that sits out is computed."""
        work.end_wait(keeps=True)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # Batches ---------------------------------------------------------------------------------------------------------

    def forced(self, wanted: Sequence[Wanted], room: int) -> dict[int, Sequence[int]]:
        """Returns the tokens that must follow the rows' histories, by row number: the tokenizer's tokens of the forced
        text, at most ``room`` in total. All of the histories must be known."""
        forced: dict[int, Sequence[int]] = {}
        meter = _Meter()
        for row, most in wanted:
            token_ids = self._forced(row, min(most, room), meter) if room else ()
            if token_ids:
                forced[row.number] = token_ids
                room -= len(token_ids)
        return forced

    def _forced(self, row: Row, at_most: int, meter: "_Meter") -> Sequence[int]:
        matcher, end = row.matcher, len(row.history)
        if matcher is None or matcher.library is None or matcher.is_pending:  # not sampled yet, or late
            return ()
        if matcher.grammar.is_apart:
            return matcher.kept(end)[: min(at_most, matcher.num_known(end))]
        if matcher.frontier <= end and matcher.grammar.try_lock():
            try:
                matcher.force_at(row.history, end, self._tools.result().tokenizer)
            finally:
                matcher.grammar.lock.release()
            meter.charge(matcher)
        return matcher.kept(end)[:at_most]

    def start_masks(self, sampled: list[SampledPosition], known: threading.Event) -> GrammarBitmasks | None:
        """Starts to compute a batch's masks; None if no row has a grammar. ``known``: see ``is_ready``."""
        indices = [index for index, sample in enumerate(sampled) if sample.row.matcher is not None]
        if not indices:
            return None
        words = np.zeros((len(indices), self._num_words), dtype=np.uint32)
        background = self._background if self.puts_off else None
        masks = MaskRound(words, known, self._tools, self._lane, background, self._notify)
        work: RowWork | None = None
        works = []
        for place, index in enumerate(indices):
            sample = sampled[index]
            if sample.drafts:  # a row's positions are adjacent, each with one more draft
                assert work is not None
                work.drafts.append(sample.drafts[-1])
                continue
            work = RowWork(sample.row, sample.position, known, lambda work: masks.finish([work]), self._tools)
            work.first = place
            works.append(work)
        added = [self._add(work, masks) for work in works]
        if any(added):
            masks.start_jobs()
        return GrammarBitmasks(indices, masks, masks.late)

    def _add(self, work: RowWork, masks: MaskRound) -> bool:
        """Adds a row's masks. Returns whether there are masks to compute for which the step waits."""
        matcher = work.matcher
        if not self.is_ready(work.row, work.known):
            masks.skip_row(work)
            return False
        if matcher.failure or matcher.fill(masks.words[work.sampled], work.end, work.drafts) > len(work.drafts):
            return False
        is_slow = matcher.grammar.is_apart or not (matcher.is_trusted or self._lane.takes_untrusted(work.tenant))
        if is_slow and self.puts_off:
            masks.skip_row(work)
            self._add_to_background(work.row, work.end, work.known)
            return False
        matcher.is_pending = True
        masks.add_row(work)
        return True


class _Meter:
    """Charges rows for CPU time of the calling thread. Reading that is slow, and left out after a short time."""

    def __init__(self) -> None:
        self._began_s, self._began_at = time.thread_time(), time.monotonic()

    def charge(self, matcher: GrammarMatcher) -> None:
        """Charges the row for the time since the last charge, if that is more than ``METERED_S``."""
        if time.monotonic() - self._began_at > METERED_S:
            now_s = time.thread_time()
            matcher.charge(now_s - self._began_s)
            self._began_s, self._began_at = now_s, time.monotonic()


def grammars_of(config: WorkerConfig) -> StructuredOutputManager:
    """Returns the manager of a worker. Call it before the model is loaded: the tokenizer is read in the meantime."""
    assert config.tokenizer is not None
    assert config.tokenizer_vocab_size is not None, "the two come from the same file"
    vocab_size = config.tokenizer_vocab_size
    num_ids = config.tokenizer_num_ids or vocab_size
    arguments = (config.tokenizer, config.special_tokens, num_ids, config.eos_token_ids, config.added_tokens)
    # Ranks that share a model must compute the same steps, but each of them compiles at its own pace.
    return StructuredOutputManager(
        partial(read_tokenizer, *arguments),
        vocab_size,
        puts_off=not config.shares_plans,
        ends_slow_rows=config.tensor_parallel_rank == 0,  # the others continue until the row is dropped
        num_ids=num_ids,
    )
