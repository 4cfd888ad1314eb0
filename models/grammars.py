"""The grammars of a worker's rows: compiled beside the steps, and masks of what they allow, found out while the layers
run. Nothing here touches a device."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from penstock.models.grammar import compile_grammar, read_tokenizer
from penstock.models.lines import Line, Masks, Words
from penstock.models.matcher import RowMatcher
from penstock.scheduler.plan import WorkerConfig

MAX_COMPILED = 32
"""Grammars that are kept for rows to come."""
MAX_THREADS = 4
"""That masks of one batch are computed in. They take cores from the layers, where these run on a CPU."""

T = TypeVar("T")


class _Thread:
    """Does one thing after another. Unlike the threads of a pool it ends with the process, whatever it waits for."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """What comes of it, later."""
        done: Future[T] = Future()
        self._work.put((done, work))
        return done

    def _run(self) -> None:
        while True:
            done, work = self._work.get()
            try:
                done.set_result(work())
            except BaseException as error:  # the library's panics are no Exceptions
                done.set_exception(error)


class _Part(NamedTuple):
    """The lines of a row that has a grammar."""

    first: int
    """Index of the first of them among the masks."""
    base: Line
    drafts: list[int]
    """After it; one more line each."""


class Grammars:
    """Makes the matchers of rows, and the masks of batches."""

    def __init__(self, read: Callable[[], LLTokenizer], vocab_size: int, puts_off: bool = True) -> None:
        """``read`` makes the tokenizer; it is called at once, on a thread of its own, since that takes a second where
        the vocabulary is large. Tokens from ``vocab_size`` on are never allowed: the model does not have them."""
        self.puts_off = puts_off
        """Whether a row whose grammar is not compiled yet has its first token in a later step; else its step waits."""
        self._vocab_size = vocab_size
        self._compiling = _Thread("grammars")
        self._masking = _Thread("masks")
        self._tokenizer: Future[LLTokenizer] = self._compiling.submit(read)
        self._filling = LLExecutor(num_threads=max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2)))
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def matcher(self, grammar: str, num_prompt_tokens: int) -> RowMatcher:
        """That of a new row. The grammar is compiled meanwhile, unless it was of late."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiling.submit(partial(self._compile, grammar))
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return RowMatcher(compiled, num_prompt_tokens, self._vocab_size)

    def _compile(self, grammar: str) -> LLMatcher:
        return compile_grammar(self._tokenizer.result(), grammar)

    def begin(self, lines: list[Line], known: threading.Event) -> Masks | None:
        """Has the masks of a batch's lines found out; None where no row of them has a grammar. ``known`` is set when
        the newest tokens of the rows are."""
        indices: list[int] = []
        parts: list[_Part] = []
        for index, line in enumerate(lines):
            if line.row.matcher is not None:
                if not line.drafts:
                    parts.append(_Part(len(indices), line, []))
                else:  # a row's lines come one after another, each with a draft more
                    parts[-1].drafts.append(line.drafts[-1])
                indices.append(index)
        if not parts:
            return None
        return Masks(indices, self._masking.submit(partial(self._masks, parts, len(indices), known)))

    def _masks(self, parts: list[_Part], num_lines: int, known: threading.Event) -> Words:
        """(lines, ceil(V / 32)). Where a row's output has ended, or cannot go on, only its end is allowed."""
        known.wait()
        tokenizer = self._tokenizer.result()
        words: Words = np.zeros((num_lines, -(-tokenizer.vocab_size // 32)), dtype=np.uint32)
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        followed: list[tuple[_Part, LLMatcher]] = []
        for part in parts:
            row = part.base.row
            assert row.matcher is not None
            matcher = row.matcher.at(row.history, part.base.position)
            if matcher is None:
                continue
            followed.append((part, matcher))
            if part.drafts:
                drafted.append((matcher, part.first, part.drafts))
            else:
                plain.append((matcher, part.first))
        where = (words.ctypes.data, 4 * words.shape[1], num_lines)
        if plain:
            self._filling.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._filling.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        _clear_from(words, self._vocab_size)
        for part, matcher in followed:
            if matcher.is_error() or not words[part.first].any():
                assert part.base.row.matcher is not None
                part.base.row.matcher.fail(part.base.position)
                words[part.first : part.first + len(part.drafts) + 1] = 0
        # What follows a draft that cannot come is never chosen.
        words[~words.any(axis=1)] = _only(tokenizer.eos_tokens, words.shape[1])
        return words


def grammars_of(config: WorkerConfig) -> Grammars | None:
    """Those of a worker; None where its model has no tokenizer. To be called before the model is loaded, which takes as
    long as reading the tokenizer."""
    if config.tokenizer is None:
        return None
    assert config.tokenizer_vocab_size is not None, "the two come from the same file"
    vocab_size = config.tokenizer_vocab_size
    num_ids = config.tokenizer_num_ids or vocab_size
    arguments = (config.tokenizer, config.special_tokens, num_ids, config.eos_token_ids, config.added_tokens)
    # Ranks that share a model compute the same steps, and each of them compiles by its own clock.
    return Grammars(partial(read_tokenizer, *arguments), vocab_size, puts_off=config.tensor_parallel_size == 1)


def _clear_from(words: Words, token_id: int) -> None:
    """Forbids this token and all of larger ids."""
    first, bit = divmod(token_id, 32)
    words[:, first : first + 1] &= np.uint32((1 << bit) - 1)
    words[:, first + 1 :] = 0


def _only(token_ids: list[int], num_words: int) -> Words:
    words: Words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words
