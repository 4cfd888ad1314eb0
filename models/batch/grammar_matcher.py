"""Matches a row's output against its grammar. Uses no batch, and only the caller's thread."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.plan import RowFailure

if TYPE_CHECKING:  # the library is installed wherever a row can have a grammar
    from llguidance import LLMatcher, LLTokenizer

Words = NDArray[np.uint32]
"""One or several masks: bit v % 32 of word v // 32 is set if token v may come."""

TOKEN_BUDGET_S = 0.05
"""The CPU time that a row's grammar may take per token, on average."""
BURST_S = 2.0
"""The CPU time that it may take beyond that before its row ends."""
SLOW_S = 0.01
"""A grammar that takes more CPU time than this for one token is slow: see ``APART_S``."""
APART_S = 5.0
"""How long no step waits for a grammar after it was slow twice within this time. A single slow token does not count,
since much is computed only once."""
MAX_BEHIND = 64
"""A row that is more tokens behind, for example after a preemption, catches up on threads that no step waits for."""
MAX_FORCED_BYTES = 256
"""Forced text is tokenized in pieces of at most this length, since a call blocks every other thread."""
HELD_BYTES = 64
"""The approximate length of the end of a piece whose tokens are computed with the next piece."""
CONSUMED_TOGETHER = 16
"""Tokens consumed per call while a row catches up."""
SLOW_CALL_S = 0.002
"""After a call that takes this long, tokens are consumed by a call that does not block other threads."""

MESSAGES = {
    RowFailure.COSTLY: "what the output must match became too costly to follow: make the constraint simpler",
    RowFailure.DEAD_END: "the constraint allows this beginning of an output, but nothing can follow it: correct the "
    "constraint",
    RowFailure.SLOW: "the constraint takes too long to follow, more than "
    f"{TOKEN_BUDGET_S * 1000:.0f} ms of computing for each token: make it smaller or less ambiguous",
}


class CompiledGrammar:
    """A grammar shared by rows. Its matchers share a lexer, so only one thread at a time may use them."""

    def __init__(self, compiled: "Future[LLMatcher]", *, forces: bool = False, puts_off: bool = True) -> None:
        """``compiled`` provides a matcher that is never changed, or raises GrammarError. With ``forces``, forced text
        may have only the tokens that the tokenizer makes of it. Without ``puts_off``, steps always wait for the
        grammar: drafts then must not depend on timing."""
        self.matcher = compiled
        self.forces = forces
        self._puts_off = puts_off
        self.lock = threading.Lock()
        """Held by the thread that uses one of the grammar's matchers."""
        self._apart_until = 0.0
        self._slow_at = -APART_S

    @property
    def is_apart(self) -> bool:
        """Whether the grammar was slow recently, so that no step waits for it."""
        return self._apart_until > 0.0 and time.monotonic() < self._apart_until

    def try_lock(self) -> bool:
        """Acquires the lock. Returns False if another thread holds it; without ``puts_off``, waits instead."""
        return self.lock.acquire(blocking=not self._puts_off)

    def note_slow(self) -> None:
        """Records that the grammar was slow. The second time within ``APART_S``, it is set apart."""
        now = time.monotonic()
        if self._puts_off and now - self._slow_at < APART_S:
            self._apart_until = now + APART_S
        self._slow_at = now


class GrammarMatcher:
    """Matches one row's output. It reads the row's history at every call, so it needs no notification of new tokens,
    rejected drafts or a restarted worker.

    The library's matcher has consumed ``history[:end]`` and the tokens that are forced to follow it::

        history  . . . . . . . .
                               ^ frontier - len(forced)
        forced                   . . .
                                       ^ frontier

    Before the frontier, the mask allows only the forced token. At the frontier, the library computes the mask.
    """

    def __init__(self, grammar: CompiledGrammar, num_prompt_tokens: int, vocab_size: int) -> None:
        """``vocab_size`` is the model's."""
        self._vocab_size = vocab_size
        self.grammar = grammar
        self.frontier = num_prompt_tokens
        """The position of the library's matcher."""
        self.library: LLMatcher | None = None
        """The library's matcher; None before the row's first use of it, and after a failure."""
        self._forced: list[int] = []
        """Forced tokens before the frontier. They are computed only once."""
        self._last_token: list[int] = []
        self.knows_text = False
        """Whether more text is forced whose tokens are not computed yet."""
        self._nothing_forced_at = -1
        """The frontier, if no token is forced there."""
        self._mask: Words | None = None
        """The library's mask at the frontier, if it was kept."""
        self._credit_s = BURST_S
        self.is_trusted = False
        """Whether its last mask took little time."""
        self.is_pending = False
        """Whether a thread is still working on it."""
        self.failure = ""
        """Why the output cannot continue, in words that the client may see."""
        self.failure_kind = RowFailure.COSTLY
        self._failed_at = 0
        """The first position that cannot be sampled."""

    def is_behind(self, end: int) -> bool:
        """Whether a row with a history of this length has to catch up first."""
        return end - self.frontier > MAX_BEHIND

    def is_ready(self, end: int) -> bool:
        """Whether the mask that follows a history of this length is known."""
        return end < self.frontier or (end == self.frontier and self._mask is not None)

    # Under the grammar's lock -----------------------------------------------------------------------------------------

    def at(
        self, history: Sequence[int], end: int, consume: "Callable[[LLMatcher, int], bool] | None" = None
    ) -> "LLMatcher | None":
        """Returns the library's matcher after ``history[:end]`` or at a later frontier; None if the output cannot
        continue. Waits until the grammar is compiled. ``consume`` consumes one token without blocking other threads; it
        is used once tokens turn out to be slow."""
        if self.failure:
            return None
        if self.library is None:
            try:
                self.library = self.grammar.matcher.result().deep_copy()
            except Exception:
                # The service could compile it, and this process cannot, perhaps for lack of memory.
                self.fail(end)
                return None
        new = list(history[self.frontier : end])
        if not new:
            self._forced = self.kept(end)
            return self.library
        if not self._consume(new, consume):
            self.fail(end)
            return None
        self.frontier, self._forced, self._mask = end, [], None
        self._last_token = new[-1:]
        self._credit_s = min(BURST_S, self._credit_s + TOKEN_BUDGET_S * len(new))
        return self.library

    def _consume(self, token_ids: list[int], consume: "Callable[[LLMatcher, int], bool] | None") -> bool:
        matcher = self.library
        assert matcher is not None
        if consume is None:
            return matcher.consume_tokens(token_ids)
        for begin in range(0, len(token_ids), CONSUMED_TOGETHER):
            began = time.thread_time()
            if not matcher.consume_tokens(token_ids[begin : begin + CONSUMED_TOGETHER]):
                return False
            if time.thread_time() - began > SLOW_CALL_S:
                return all(consume(matcher, token_id) for token_id in token_ids[begin + CONSUMED_TOGETHER :])
        return True

    def force(self, tokenizer: "LLTokenizer") -> bool:
        """Moves the frontier past the forced tokens that follow it. Returns whether there are any."""
        matcher = self.library
        assert matcher is not None, "the row has begun"
        if not self.grammar.forces or self._nothing_forced_at == self.frontier or self._mask is not None:
            return False
        token_ids = self._forced_tokens(matcher, tokenizer)
        # The tokenizer may spell the text with tokens that the model lacks.
        token_ids = list(takewhile(lambda token_id: token_id < self._vocab_size, token_ids))
        if not token_ids or not matcher.consume_tokens(token_ids):
            self._nothing_forced_at = self.frontier
            return False
        self.frontier += len(token_ids)
        self._forced, self._mask = self._forced + token_ids, None
        self._last_token = token_ids[-1:]
        return True

    def force_at(self, history: Sequence[int], end: int, tokenizer: "LLTokenizer") -> None:
        """Computes the tokens that must follow ``history[:end]``."""
        if self.at(history, end) is not None:
            self.force(tokenizer)

    def _forced_tokens(self, matcher: "LLMatcher", tokenizer: "LLTokenizer") -> list[int]:
        text = matcher.compute_ff_bytes()
        self.knows_text = len(text) > MAX_FORCED_BYTES
        if len(text) <= MAX_FORCED_BYTES:
            return matcher.compute_ff_tokens() if text else []
        # The rest of a long text is forced once this piece is used up. The library writes a special token as text that
        # begins with 0xFF, which only ``compute_ff_tokens`` reads.
        piece = text[:MAX_FORCED_BYTES].partition(b"\xff")[0]
        token_ids = tokenizer.tokenize_partial(piece, self._last_token)[0]
        # Near the cut the whole text may have other tokens, and a row that continues after a crash has other cuts.
        num_held = 0 if len(piece) == MAX_FORCED_BYTES else HELD_BYTES
        while num_held < HELD_BYTES and len(token_ids) > 1:
            num_held += len(tokenizer.decode_bytes([token_ids.pop()]))
        return token_ids

    def num_valid(self, history: Sequence[int], drafts: Sequence[int]) -> int:
        """Returns how many of the drafts may follow the history; 0 if another thread holds the lock, which it takes."""
        if self.library is None or self.is_pending or not self.grammar.try_lock():
            return 0
        try:
            if self.grammar.is_apart:
                return self._num_agreeing(len(history), drafts[: self.num_known(len(history))])
            matcher = self.at(history, len(history))
            if matcher is None:
                return 0
            count = self._num_agreeing(len(history), drafts)
            rest = list(drafts[count:])
            # A kept mask was late. The masks after more drafts might be late too, and so on without end.
            is_at_frontier = len(history) + count == self.frontier and self._mask is None
            return count + (matcher.validate_tokens(rest) if rest and is_at_frontier else 0)
        finally:
            self.grammar.lock.release()

    # Kept results -----------------------------------------------------------------------------------------------------

    def kept(self, end: int) -> list[int]:
        """Returns the known forced tokens that follow a history of this length."""
        behind = self.frontier - end
        return self._forced[-behind:] if 0 < behind <= len(self._forced) else []

    def num_known(self, end: int) -> int:
        """Returns how many kept tokens can be drafted with all masks known, that after the last included."""
        return max(0, len(self.kept(end)) - (self._mask is None))

    def _num_agreeing(self, end: int, drafts: Sequence[int]) -> int:
        pairs = zip(self.kept(end), drafts, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def fill(self, words: Words, end: int, drafts: Sequence[int]) -> int:
        """Writes the known masks of a row's sampled positions; position i follows a history of length ``end`` and i
        drafts. Returns the number of positions that need no more work: all of them if a draft cannot come. The masks of
        positions after such a draft are left unchanged."""
        kept = self.kept(end)
        for index, token_id in enumerate(kept[: len(words)]):
            words[index, token_id // 32] = np.uint32(1 << (token_id % 32))
            if index < len(drafts) and drafts[index] != token_id:
                return len(words)
        count = min(len(kept), len(words))
        if count < len(words) and self._mask is not None and end + count == self.frontier:
            words[count] = self._mask
            count += 1
        return count

    def keep(self, mask: Words) -> None:
        """Keeps the mask at the frontier."""
        self._mask = mask.copy()

    # Limits and failure -----------------------------------------------------------------------------------------------

    def charge(self, cpu_s: float, num_tokens: int = 1) -> bool:
        """Charges CPU time for this many tokens to the row. Returns False once its credit is used up."""
        if cpu_s > SLOW_S * num_tokens:
            self.grammar.note_slow()
        self._credit_s -= cpu_s
        return self._credit_s >= 0.0

    def fail(self, position: int, kind: RowFailure | None = None) -> None:
        """Records that no token can be chosen for this position. The library's own reason quotes the client's text,
        which no message may repeat."""
        if kind is None:
            # The library's errors are about its limits, except for this one.
            error = "" if self.library is None else self.library.get_error()
            is_dead_end = self.library is not None and (not error or error.startswith("NoExtension"))
            kind = RowFailure.DEAD_END if is_dead_end else RowFailure.COSTLY
        self._failed_at = position
        self.failure_kind = kind
        self.failure = MESSAGES[kind]
        self.library = self._mask = None
        self._forced = []

    def fails_at(self, position: int) -> bool:
        """Whether the token chosen for this position is a placeholder that only marks the end of the output."""
        return bool(self.failure) and position >= self._failed_at
