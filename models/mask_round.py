"""Computes the masks of one batch on a thread while the layers run. A step waits for them no longer than its budget."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.models.mask_lanes import BackgroundLane
from penstock.models.matcher import CompiledGrammar, RowMatcher, Words
from penstock.models.rows import Row
from penstock.scheduler.plan import RowFailure

logger = logging.getLogger(__name__)

STEP_BUDGET_S = 0.01
"""How long a step waits for masks once the tokens before them are known. The time of the layers is not added to it."""
TRUSTED_S = 0.001
"""Rows whose last masks took no longer than this are computed, and measured, together."""


class MaskTools:
    """Tools for computing masks."""

    def __init__(self, tokenizer: LLTokenizer, num_threads: int, vocab_size: int, *, ends_slow_rows: bool) -> None:
        """Tokens from ``vocab_size`` on are never allowed. ``ends_slow_rows``: whether a row ends when its grammar has
        used up its CPU time."""
        self.tokenizer = tokenizer
        self.ends_slow_rows = ends_slow_rows
        self.num_words = -(-tokenizer.vocab_size // 32)
        self.end_words = _only(tokenizer.eos_tokens, self.num_words)
        self._vocab_size = vocab_size
        self._executor = LLExecutor(num_threads=num_threads)
        self._of_thread = threading.local()

    def fill(
        self, plain: list[tuple[LLMatcher, int]], drafted: list[tuple[LLMatcher, int, list[int]]], words: Words
    ) -> None:
        """Writes masks of matchers, each at its index, and those after drafts behind it."""
        where = (words.ctypes.data, 4 * words.shape[1], len(words))
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """Consumes a token while other threads run. The library lets them only where it is given two matchers: the
        other one is in error, and takes no time."""
        mine = self._of_thread
        if not hasattr(mine, "executor"):
            mine.executor, mine.broken = LLExecutor(num_threads=1), LLMatcher(self.tokenizer, "start: [", log_level=0)
        return bool(mine.executor.consume_token_par([(matcher, token_id), (mine.broken, 0)])[0])

    def clear_unknown(self, words: Words) -> None:
        """Forbids tokens that the model does not have."""
        first, bit = divmod(self._vocab_size, 32)
        words[:, first : first + 1] &= np.uint32((1 << bit) - 1)
        words[:, first + 1 :] = 0


def _only(token_ids: list[int], num_words: int) -> Words:
    words: Words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words


class RowWork:
    """Lines of one row: the first follows its history of length ``end``, each other one a draft more."""

    def __init__(
        self, row: Row, end: int, known: threading.Event, on_done: "Callable[[RowWork], None]", tools: MaskTools
    ) -> None:
        """``known`` is set when all of the history is known. ``on_done`` is called when the masks are in ``words``."""
        assert row.matcher is not None, "the row has a grammar"
        self.row = row
        self.matcher: RowMatcher = row.matcher
        self.end = end
        self.drafts: list[int] = []
        self.first = 0
        """Index of the first of its lines among the masks."""
        self.words: Words | None = None
        """The masks of all lines of a batch; None: of its own line."""
        self.known = known
        self._on_done = on_done
        self._tools = tools

    @property
    def tenant(self) -> str:
        """The row's."""
        return self.row.tenant

    @property
    def lock(self) -> threading.Lock:
        """The grammar's."""
        return self.matcher.grammar.lock

    @property
    def lines(self) -> slice:
        """Where its masks are."""
        return slice(self.first, self.first + 1 + len(self.drafts))

    def run(self) -> None:
        """Computes its masks, and charges the row for the CPU time."""
        self.known.wait()
        if self.words is None:
            self.words = np.zeros((1, self._tools.num_words), dtype=np.uint32)
        began_s = time.thread_time()
        if not self.row.is_dropped:
            compute([self], self.words, self._tools)
        cpu_s = time.thread_time() - began_s
        self.matcher.is_trusted = cpu_s <= TRUSTED_S
        if not self.matcher.charge(cpu_s) and self._tools.ends_slow_rows:
            self.fail(RowFailure.SLOW)
        self.finish()

    def finish(self) -> None:
        """Reports that its masks are computed."""
        self._on_done(self)

    def fail(self, kind: RowFailure | None = None) -> None:
        """Ends the row's output."""
        assert self.words is not None
        self.matcher.fail(self.end, kind)
        self.words[self.lines] = 0

    def keep(self) -> None:
        """Keeps the mask at the matcher's frontier, for a later batch."""
        index = self.matcher.frontier - self.end
        if self.words is not None and not self.matcher.failure and 0 <= index <= len(self.drafts):
            mask = self.words[self.first + index]
            if mask.any():  # else it follows a draft that cannot come
                self.matcher.keep(mask)


def compute(works: Sequence[RowWork], words: Words, tools: MaskTools) -> None:
    """Writes the masks of rows' lines. The caller has the locks of the rows' grammars. Where a row's output cannot go
    on, its lines stay empty, and so do lines after a draft that cannot come."""
    try:
        _compute(works, words, tools)
    except BaseException:  # the library's panics are no Exceptions
        logger.exception("masks could not be computed")
        for work in works:
            work.fail(RowFailure.COSTLY)


def _compute(works: Sequence[RowWork], words: Words, tools: MaskTools) -> None:
    plain: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    asked: list[tuple[RowWork, LLMatcher, int]] = []
    for work in works:
        library = work.matcher.at(work.row.history, work.end, tools.consume)
        if library is None:
            continue
        num_filled, is_found = _fill_forced(work, library, words, tools)
        if num_filled > len(work.drafts):
            continue
        # The library goes on where it stands, also if the mask there is known.
        num_passed = work.matcher.frontier - work.end
        first, rest = work.first + num_passed, work.drafts[num_passed:]
        if rest:
            drafted.append((library, first, rest))
        elif not is_found:
            plain.append((library, first))
        asked.append((work, library, first))
    tools.fill(plain, drafted, words)
    for work, library, first in asked:
        tools.clear_unknown(words[first : work.lines.stop])
        if library.is_error() or not words[first].any():
            work.fail()


def _fill_forced(work: RowWork, library: LLMatcher, words: Words, tools: MaskTools) -> tuple[int, bool]:
    """Writes the masks of lines at which a token is forced. Returns the number of lines for which nothing is left to
    do, and whether the next line has the library's mask already."""
    matcher, lines = work.matcher, words[work.lines]
    num_filled = matcher.fill(lines, work.end, work.drafts)
    while num_filled < len(lines):
        if matcher.grammar.is_apart and not matcher.knows_text:
            # Finding out the text may take long. Here it does not keep other threads waiting.
            tools.fill([(library, work.first + num_filled)], [], words)
            if not _is_single(lines[num_filled]):
                return num_filled, True
        if not matcher.force(tools.tokenizer):
            break
        num_filled = matcher.fill(lines, work.end, work.drafts)
    return num_filled, False


def _is_single(mask: Words) -> bool:
    """Whether it allows just one token."""
    [at] = mask.nonzero()
    return len(at) == 1 and int(mask[at[0]]).bit_count() == 1


class MaskRound:
    """The masks of one batch. One thread runs it, another waits for its result."""

    def __init__(
        self, words: Words, known: threading.Event, tools: MaskTools, background: BackgroundLane | None
    ) -> None:
        """``background`` takes rows that are late; None: there is no budget, and the step waits for all of them."""
        self.words = words
        self.late: set[int] = set()
        """Numbers of rows whose masks were not there in time, once there is a result: nothing may be chosen by them."""
        self.is_over = False
        """Whether its thread is free again."""
        self._known = known
        self._tools = tools
        self._background = background
        self._created_at = time.monotonic()
        self._changed = threading.Condition()
        self._works: list[RowWork] = []
        self._open: set[RowWork] = set()
        self._late_lines: list[slice] = []
        self._is_closed = self._is_abandoned = False

    def add(self, work: RowWork) -> None:
        """Before it is run: one more row."""
        self._works.append(work)
        self._open.add(work)
        work.words = self.words

    def sits_out(self, work: RowWork) -> None:
        """Before it is run: a row that is late already."""
        self._give_up(work)

    def _give_up(self, work: RowWork) -> None:
        self.late.add(work.row.number)
        self._late_lines.append(work.lines)

    def finish(self, work: RowWork) -> None:
        """The masks of a row are there."""
        with self._changed:
            self._open.discard(work)
            if self._is_closed:
                work.keep()
            if not self._open:
                self._changed.notify_all()

    def abandon(self) -> None:
        """Its thread is not to begin with another row."""
        self._is_abandoned = True

    def run(self) -> None:
        """Computes the masks: of rows that took little time together, of each other one by itself."""
        self._known.wait()
        took_s: defaultdict[CompiledGrammar, float] = defaultdict(float)
        try:
            self._run_together([work for work in self._works if work.matcher.is_trusted])
            for work in self._works:
                if work in self._open and not self._hands_over(work):
                    began_s = time.thread_time()
                    try:
                        work.run()
                    finally:
                        work.lock.release()
                    grammar = work.matcher.grammar
                    took_s[grammar] += time.thread_time() - began_s
                    if took_s[grammar] > STEP_BUDGET_S:
                        # Many rows may take long together though none does by itself.
                        grammar.note_slow()
                        took_s[grammar] = 0.0
        finally:
            self.is_over = True

    def _hands_over(self, work: RowWork) -> bool:
        """Whether a thread in the background has a row from now on. If not, the lock of its grammar is taken."""
        if self._background is None:
            work.lock.acquire()
            return False
        if not self._is_abandoned and work.lock.acquire(blocking=False):
            return False
        self._background.add(work)
        return True

    def _run_together(self, works: list[RowWork]) -> None:
        began_s = time.monotonic()
        with ExitStack() as held:
            taken: set[threading.Lock] = set()
            together = []
            for work in works:
                if work.lock not in taken and work.lock.acquire(blocking=self._background is None):
                    taken.add(work.lock)
                    held.callback(work.lock.release)
                if work.lock in taken:
                    together.append(work)
            if together:
                compute(together, self.words, self._tools)
        if time.monotonic() - began_s > TRUSTED_S * max(2, len(together)):
            for work in together:
                work.matcher.is_trusted = False
        for work in together:
            work.finish()

    def result(self) -> Words:
        """(lines, ceil(V / 32)), within the budget. Where a row's output has ended, cannot go on, or is late, only its
        end is allowed."""
        began_at = self._created_at
        if not self._known.is_set():
            self._known.wait()
            began_at = time.monotonic()
        with self._changed:
            left_s = None if self._background is None else max(0.0, began_at + STEP_BUDGET_S - time.monotonic())
            self._changed.wait_for(lambda: not self._open, left_s)
            self._is_closed = True
            for work in self._open:
                self._give_up(work)
        # Rows that are late may be written still.
        words = self.words.copy() if self._open else self.words
        for lines in self._late_lines:
            words[lines] = 0
        # What follows a draft that cannot come is never chosen.
        words[~words.any(axis=1)] = self._tools.end_words
        return words
