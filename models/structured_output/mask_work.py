"""Computes the masks of rows, and charges the rows for the CPU time. Independent of threads and batches."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.models.batch.grammar_matcher import CONSUMED_TOGETHER, GrammarMatcher, Words
from penstock.models.batch.rows import Row
from penstock.scheduler.plan import RowFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRUSTED_S = 0.001
"""Rows whose last masks took no longer than this per sampled position are computed and measured together."""


class MaskTools:
    """Tools for computing masks."""

    def __init__(self, tokenizer: LLTokenizer, num_threads: int, vocab_size: int, *, ends_slow_rows: bool) -> None:
        """Tokens from ``vocab_size`` on are never allowed. ``ends_slow_rows``: rows end when their CPU time is up."""
        self.tokenizer = tokenizer
        self.ends_slow_rows = ends_slow_rows
        self.num_words = -(-tokenizer.vocab_size // 32)
        self.end_words = _only(tokenizer.eos_tokens, self.num_words)
        self._vocab_size = vocab_size
        self._has_unknown = tokenizer.vocab_size > vocab_size
        self._num_threads = num_threads
        self._of_thread = threading.local()

    def _executor(self) -> LLExecutor:
        """Returns the calling thread's executor. Each thread has its own, so that none waits for another's work."""
        mine = self._of_thread
        if not hasattr(mine, "executor"):
            mine.executor = LLExecutor(self._num_threads)
            mine.broken = LLMatcher(self.tokenizer, "start: [", log_level=0)
        executor: LLExecutor = mine.executor
        return executor

    def fill(
        self, plain: list[tuple[LLMatcher, int]], drafted: list[tuple[LLMatcher, int, list[int]]], words: Words
    ) -> None:
        """Writes the mask of each matcher at its index, followed by the masks after its drafts."""
        executor, where = self._executor(), (words.ctypes.data, 4 * words.shape[1], len(words))
        for some in self._parts(plain):
            executor.unsafe_compute_mask_ptr(some, *where)
        for some_drafted in self._parts(drafted):
            executor.unsafe_compute_mask_ptr_with_draft_token(some_drafted, *where)

    def _parts(self, given: list[T]) -> list[list[T]]:
        """Splits the work by call: the library uses its own threads only for several masks."""
        if self._num_threads == 1:
            return [[one] for one in given]
        return [given] if given else []

    def consume(self, matcher: LLMatcher, token_id: int) -> bool:
        """Consumes a token without blocking other threads. The library does so only if it gets two matchers, so the
        second one is in an error state and takes no time."""
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
    """The sampled positions of one row: the first follows its history of length ``end``, each later one a draft."""

    def __init__(
        self, row: Row, end: int, known: threading.Event, on_done: "Callable[[RowWork], None]", tools: Future[MaskTools]
    ) -> None:
        """``known`` is set with the history. ``on_done`` is called with masks in ``words``, and calls ``end_wait``."""
        assert row.matcher is not None, "the row has a grammar"
        self.row = row
        self.tenant = row.tenant
        self.matcher: GrammarMatcher = row.matcher
        self.lock = row.matcher.grammar.lock
        self.end = end
        self.drafts: list[int] = []
        self.first = 0
        """The index of its first mask in the batch's masks."""
        self.words: Words | None = None
        """The masks of the whole batch. None means that the row gets an array of its own, with one mask."""
        self.known = known
        self._on_done = on_done
        self._tools = tools

    @property
    def sampled(self) -> slice:
        return slice(self.first, self.first + 1 + len(self.drafts))

    def run(self) -> bool:
        """Computes the masks, and charges the row for the CPU time. A row that is far behind only catches up by a few
        tokens; this then returns False and must be called again."""
        with failing([self]):
            began_s = time.thread_time()
            is_behind = self.matcher.is_behind(self.end) and not self.row.is_dropped
            num_tokens = CONSUMED_TOGETHER if is_behind else 1 + len(self.drafts)
            if is_behind:
                end = min(self.end, self.matcher.frontier + num_tokens)
                self.matcher.at(self.row.history, end, self._tools.result().consume)
            elif not self.row.is_dropped:
                tools = self._tools.result()
                if self.words is None:
                    self.words = np.zeros((1, tools.num_words), dtype=np.uint32)
                compute([self], self.words, tools)
            cpu_s = time.thread_time() - began_s
            self.matcher.is_trusted = cpu_s <= TRUSTED_S * num_tokens
            if not self.matcher.charge(cpu_s, num_tokens) and self._tools.result().ends_slow_rows:
                self.fail(RowFailure.SLOW)
            return not is_behind or bool(self.matcher.failure)
        return True

    def finish(self) -> None:
        self._on_done(self)

    def end_wait(self, keeps: bool) -> None:
        """Lets the row be in a batch again. With ``keeps``, keeps the mask at the frontier for a later batch."""
        index = self.matcher.frontier - self.end
        if keeps and self.words is not None and not self.matcher.failure and 0 <= index <= len(self.drafts):
            with failing([self]):
                mask = self.words[self.first + index]
                if mask.any():  # if not, it follows a draft that cannot come
                    self.matcher.keep(mask)
        self.matcher.is_pending = False

    def fail(self, kind: RowFailure | None = None) -> None:
        """Ends the row's output."""
        self.matcher.fail(self.end, kind)
        if self.words is not None:
            self.words[self.sampled] = 0


@contextmanager
def failing(works: Sequence[RowWork]) -> Iterator[None]:
    """Ends only these rows if the block raises an error. The library's panics are not Exceptions."""
    try:
        yield
    except BaseException:
        logger.exception("masks could not be computed")
        for work in works:
            work.fail(RowFailure.COSTLY)


def compute(works: Sequence[RowWork], words: Words, tools: MaskTools) -> None:
    """Writes the masks of the rows' sampled positions. The caller holds the locks of the rows' grammars. The masks stay
    empty if the row's output cannot continue, and after a draft that cannot come."""
    plain: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    requested: list[tuple[RowWork, LLMatcher, int]] = []
    for work in works:
        library = work.matcher.at(work.row.history, work.end, tools.consume)
        if library is None:
            continue
        num_filled, is_found = _fill_forced(work, library, words, tools)
        if num_filled > len(work.drafts):
            continue
        # The library computes drafts' masks from its own position, even if the mask there is known.
        num_passed = work.matcher.frontier - work.end
        first, rest = work.first + num_passed, work.drafts[num_passed:]
        if rest:
            drafted.append((library, first, rest))
        elif not is_found:
            plain.append((library, first))
        requested.append((work, library, first))
    tools.fill(plain, drafted, words)
    for work, library, first in requested:
        tools.clear_unknown(words[first : work.sampled.stop])
        if library.is_error() or not words[first].any():
            work.fail()


def _fill_forced(work: RowWork, library: LLMatcher, words: Words, tools: MaskTools) -> tuple[int, bool]:
    """Writes the masks of positions at which a token is forced. Returns the number of positions that need no more work,
    and whether the next position already has the library's mask."""
    matcher, sampled = work.matcher, words[work.sampled]
    num_filled = matcher.fill(sampled, work.end, work.drafts)
    while num_filled < len(sampled):
        if matcher.grammar.is_apart and not matcher.knows_text:
            # Computing the text may take long. This call does not block other threads.
            tools.fill([(library, work.first + num_filled)], [], words)
            if not _is_single(sampled[num_filled]):
                return num_filled, True
        if not matcher.force(tools.tokenizer):
            break
        num_filled = matcher.fill(sampled, work.end, work.drafts)
    return num_filled, False


def _is_single(mask: Words) -> bool:
    """Whether a mask allows exactly one token."""
    [at] = mask.nonzero()
    return len(at) == 1 and int(mask[at[0]]).bit_count() == 1
