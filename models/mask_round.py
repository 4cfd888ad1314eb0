"""Computes the masks of one batch on a thread while the layers run. A step waits for them no longer than its budget."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.models.mask_lanes import RECHECK_S, BackgroundLane, Job, StepLane
from penstock.models.matcher import CONSUMED_TOGETHER, CompiledGrammar, RowMatcher, Words
from penstock.models.rows import Row
from penstock.scheduler.plan import RowFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")

STEP_BUDGET_S = 0.01
"""How long a step waits for masks once the tokens before them are known. The time of the layers is not added to it."""
LOADED_BUDGET_S = 0.03
"""How long it waits while the thread that computes them has not had ``STEP_BUDGET_S`` of CPU time, since other
programs use the cores."""
TRUSTED_S = 0.001
"""Rows whose last masks took no longer than this for each line are computed, and measured, together."""


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
        self._has_unknown = tokenizer.vocab_size > vocab_size
        self._num_threads = num_threads
        self._of_thread = threading.local()

    def _executor(self) -> LLExecutor:
        """One for each of our threads, so that none of them waits for what another one computes."""
        mine = self._of_thread
        if not hasattr(mine, "executor"):
            mine.executor, mine.broken = (
                LLExecutor(self._num_threads),
                LLMatcher(self.tokenizer, "start: [", log_level=0),
            )
        executor: LLExecutor = mine.executor
        return executor

    def fill(
        self, plain: list[tuple[LLMatcher, int]], drafted: list[tuple[LLMatcher, int, list[int]]], words: Words
    ) -> None:
        """Writes masks of matchers, each at its index, and those after drafts behind it."""
        executor, where = self._executor(), (words.ctypes.data, 4 * words.shape[1], len(words))
        for some in self._parts(plain):
            executor.unsafe_compute_mask_ptr(some, *where)
        for some_drafted in self._parts(drafted):
            executor.unsafe_compute_mask_ptr_with_draft_token(some_drafted, *where)

    def _parts(self, given: list[T]) -> list[list[T]]:
        """The library computes several masks on threads of its own, and one on the calling thread."""
        if self._num_threads == 1:
            return [[one] for one in given]
        return [given] if given else []

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """Consumes a token while other threads run. The library lets them only where it is given two matchers: the
        other one is in error, and takes no time."""
        executor = self._executor()
        return bool(executor.consume_token_par([(matcher, token_id), (self._of_thread.broken, 0)])[0])

    def clear_unknown(self, words: Words) -> None:
        """Forbids tokens that the model does not have."""
        if not self._has_unknown:
            return
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
        self, row: Row, end: int, known: threading.Event, on_done: "Callable[[RowWork], None]", tools: Future[MaskTools]
    ) -> None:
        """``known`` is set when all of the history is known. ``on_done`` is called when the masks are in ``words``; it
        calls ``end_wait``."""
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

    def run(self) -> bool:
        """Computes its masks, and charges the row for the CPU time. A row that is far behind only catches up a little;
        then this returns False, and it is called again."""
        matcher, num_tokens, is_done = self.matcher, 1 + len(self.drafts), True
        began_s = time.thread_time()
        with _failing([self]):
            if self.row.is_dropped:
                pass
            elif matcher.is_behind(self.end):
                num_tokens = CONSUMED_TOGETHER
                matcher.at(self.row.history, matcher.frontier + num_tokens, self._tools.result().consume)
                is_done = bool(matcher.failure)
            else:
                self.words = self._new_words() if self.words is None else self.words
                compute([self], self.words, self._tools.result())
        cpu_s = time.thread_time() - began_s
        matcher.is_trusted = cpu_s <= TRUSTED_S * num_tokens
        if not matcher.charge(cpu_s, num_tokens) and self._tools.result().ends_slow_rows:
            self.fail(RowFailure.SLOW)
            return True
        return is_done

    def _new_words(self) -> Words:
        return np.zeros((1, self._tools.result().num_words), dtype=np.uint32)

    def finish(self) -> None:
        """Reports that its masks are computed."""
        self._on_done(self)

    def end_wait(self, keeps: bool) -> None:
        """The row may be in a batch again. ``keeps``: the mask at the matcher's frontier is for a later batch."""
        if keeps:
            with _failing([self]):
                self._keep()
        self.matcher.is_pending = False

    def fail(self, kind: RowFailure | None = None) -> None:
        """Ends the row's output."""
        self.matcher.fail(self.end, kind)
        if self.words is not None:
            self.words[self.lines] = 0

    def _keep(self) -> None:
        index = self.matcher.frontier - self.end
        if self.words is not None and not self.matcher.failure and 0 <= index <= len(self.drafts):
            mask = self.words[self.first + index]
            if mask.any():  # else it follows a draft that cannot come
                self.matcher.keep(mask)


@contextmanager
def _failing(works: Sequence[RowWork]) -> Iterator[None]:
    """Ends the rows, and nothing else, where something goes wrong. The library's panics are no Exceptions."""
    try:
        yield
    except BaseException:
        logger.exception("masks could not be computed")
        for work in works:
            work.fail(RowFailure.COSTLY)


def compute(works: Sequence[RowWork], words: Words, tools: MaskTools) -> None:
    """Writes the masks of rows' lines. The caller has the locks of the rows' grammars. Where a row's output cannot go
    on, its lines stay empty, and so do lines after a draft that cannot come."""
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
    """The masks of one batch. Threads of a lane compute them, another one waits for its result."""

    def __init__(
        self,
        words: Words,
        known: threading.Event,
        tools: Future[MaskTools],
        lane: StepLane,
        background: BackgroundLane | None,
        on_late: Callable[[], None],
    ) -> None:
        """``background`` takes rows that are late; None: there is no budget, and the step waits for all of them.
        ``on_late`` is called when a row that was late may be in a batch again."""
        self.words = words
        self.late: set[int] = set()
        """Numbers of rows whose masks were not there in time, once there is a result: nothing may be chosen by them."""
        self._known = known
        self._tools = tools
        self._lane = lane
        self._background = background
        self._on_late = on_late
        self._created = time.monotonic(), lane.cpu_s()
        self._changed = threading.Condition()
        self._works: list[RowWork] = []
        self._open: set[RowWork] = set()
        """Works that the step waits for."""
        self._late_lines: list[slice] = []
        self._took_s: defaultdict[CompiledGrammar, float] = defaultdict(float)

    def add(self, work: RowWork) -> None:
        """Before it is begun: one more row."""
        self._works.append(work)
        self._open.add(work)
        work.words = self.words

    def sits_out(self, work: RowWork) -> None:
        """The step does not wait for a row."""
        self._open.discard(work)
        self.late.add(work.row.number)
        self._late_lines.append(work.lines)

    def begin(self) -> None:
        """Has the masks computed: of a tenant's rows that took little time together, of each other row by itself."""
        together: defaultdict[str, list[RowWork]] = defaultdict(list)
        for work in self._works:
            if work.matcher.is_trusted:
                together[work.tenant].append(work)
        jobs = [Job(tenant, self._known, partial(self._run_together, works)) for tenant, works in together.items()]
        alone = [work for work in self._works if not work.matcher.is_trusted]
        self._lane.add(jobs + [Job(work.tenant, self._known, partial(self._run_alone, work)) for work in alone])

    def finish(self, works: Sequence[RowWork]) -> None:
        """The masks of rows are there."""
        with self._changed:
            num_late = 0
            for work in works:
                is_late = work not in self._open
                work.end_wait(keeps=is_late)
                num_late += is_late
                self._open.discard(work)
            if not self._open:
                self._changed.notify_all()
        if num_late:
            self._on_late()

    def _run_alone(self, work: RowWork) -> None:
        if not self._lock(work):
            return
        began_s = time.thread_time()
        while not work.run():
            pass
        work.lock.release()
        grammar = work.matcher.grammar
        self._took_s[grammar] += time.thread_time() - began_s
        if self._took_s[grammar] > STEP_BUDGET_S:
            # Many rows may take long together though none does by itself.
            grammar.note_slow()
            self._took_s[grammar] = 0.0
        self.finish([work])

    def _run_together(self, works: list[RowWork]) -> None:
        began_s = time.monotonic()
        with ExitStack() as held:
            taken: set[threading.Lock] = set()
            together = []
            for work in works:
                if work.lock not in taken and self._lock(work):
                    taken.add(work.lock)
                    held.callback(work.lock.release)
                if work.lock in taken:
                    together.append(work)
            with _failing(together):
                compute(together, self.words, self._tools.result())
        num_lines = sum(1 + len(work.drafts) for work in together)
        if time.monotonic() - began_s > TRUSTED_S * max(2, num_lines):
            for work in together:
                work.matcher.is_trusted = False
        self.finish(together)

    def _lock(self, work: RowWork) -> bool:
        """Takes the lock of the row's grammar. While another thread has it the row goes to the background, and this
        returns False."""
        if work.lock.acquire(blocking=self._background is None):
            return True
        assert self._background is not None
        with self._changed:
            if work in self._open:
                self.sits_out(work)
            if not self._open:
                self._changed.notify_all()
        self._background.add(work)
        return False

    def result(self) -> Words:
        """(lines, ceil(V / 32)), within the budget. Where a row's output has ended, or cannot go on, only its end is
        allowed; where it is late the mask means nothing."""
        began = self._created
        if not self._known.is_set():
            self._known.wait()
            began = time.monotonic(), self._lane.cpu_s()
        with self._changed:
            while self._open and (left_s := self._left_s(*began)) > 0.0:
                self._changed.wait(left_s)
            for work in list(self._open):
                self.sits_out(work)
        words = self.words.copy() if self._late_lines else self.words
        for lines in self._late_lines:
            words[lines] = 0
            words[lines, 0] = 1
        # What follows a draft that cannot come is never chosen.
        is_empty = ~words.any(axis=1)
        if is_empty.any():
            words[is_empty] = self._tools.result().end_words
        return words

    def _left_s(self, began_at: float, began_cpu_s: float) -> float:
        """How long to wait at most before looking again."""
        if self._background is None:
            return threading.TIMEOUT_MAX
        waited_s = time.monotonic() - began_at
        if waited_s < STEP_BUDGET_S:
            return STEP_BUDGET_S - waited_s
        used_s = self._lane.cpu_s() - began_cpu_s
        return RECHECK_S if waited_s < LOADED_BUDGET_S and used_s < STEP_BUDGET_S else 0.0
