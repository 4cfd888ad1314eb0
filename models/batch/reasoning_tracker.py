"""Follows a row's output through its reasoning, and decides where its limit forces the tokens that close it."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from penstock.scheduler.reasoning_limit import ReasoningLimit


class _Section(Enum):
    ANSWER = auto()
    """Outside reasoning, but some may follow."""
    REASONING = auto()
    LAST = auto()
    """No reasoning follows."""


class _Progress(NamedTuple):
    """The tracker's progress after a prefix of the history."""

    end: int
    """The length of that prefix."""
    section: _Section
    matched: int = 0
    """The state of the search for the section's end."""
    num_tokens: int = 0
    """The number of reasoning tokens so far."""
    forced: tuple[int, ...] = ()
    """The tokens that must follow."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be forced."""
        return self.section is _Section.LAST and not self.forced


class ReasoningTracker:
    """Reads the row's history at every call, so it needs no notification of new tokens, rejected drafts or a restarted
    worker. Several threads may call it: each only replaces the saved progress with later progress."""

    def __init__(self, limit: ReasoningLimit, num_prompt_tokens: int) -> None:
        self._limit = limit
        begun = _Progress(num_prompt_tokens, _Section.REASONING if limit.is_open else _Section.ANSWER)
        self._begun = self._known = self._with_forced(begun)

    def forced_token(self, history: Sequence[int], end: int, drafts: Sequence[int] = ()) -> int | None:
        """Returns the token that must follow ``history[:end]``, which is known, and the drafts; None if any token
        may."""
        progress = self._after(history, end)
        assert progress.is_over or progress.end == end, "all tokens are known"
        for token_id in drafts:
            progress = self._next(progress, token_id)
        return progress.forced[0] if progress.forced else None

    def may_force(self, history: Sequence[int], end: int, drafts: Sequence[int] = ()) -> bool:
        """Whether a token may be forced after ``history[:end]`` and the drafts. Without drafts, the last tokens before
        ``end`` may be unknown."""
        progress = self._after(history, end)
        num_unknown = end - progress.end
        # A marker that opens the reasoning takes at least one token.
        num_more = num_unknown + len(drafts) - (progress.section is _Section.ANSWER)
        is_far = not progress.forced and progress.num_tokens + num_more < self._limit.max_tokens
        if progress.is_over or is_far:
            return False
        return num_unknown > 0 or self.forced_token(history, end, drafts) is not None

    def _after(self, history: Sequence[int], end: int) -> _Progress:
        """Returns the progress after the known part of ``history[:end]``."""
        progress = self._known if self._known.end <= end else self._begun
        while not progress.is_over and progress.end < end and history[progress.end] >= 0:
            progress = self._next(progress, history[progress.end])
        self._known = progress
        return progress

    def _next(self, progress: _Progress, token_id: int) -> _Progress:
        """Returns the progress after one more token."""
        section = progress.section
        after = progress._replace(end=progress.end + 1, forced=progress.forced[1:])
        if section is _Section.LAST:
            return after
        search = self._limit.closes if section is _Section.REASONING else self._limit.opens
        assert search is not None, "reasoning that cannot reopen is the last"
        matched = search.move(progress.matched, token_id)
        if matched < 0:
            return after._replace(section=_Section.LAST)
        if section is _Section.REASONING and matched < search.length:
            return self._with_forced(after._replace(matched=matched, num_tokens=progress.num_tokens + 1))
        if section is _Section.REASONING:
            opens = self._limit.opens
            may_open = opens is not None and not opens.at_beginning
            return after._replace(section=_Section.ANSWER if may_open else _Section.LAST, matched=0)
        if matched == search.length:
            return self._with_forced(after._replace(section=_Section.REASONING, matched=0))
        return after._replace(matched=matched)

    def _with_forced(self, progress: _Progress) -> _Progress:
        """Adds the tokens that must follow if the reasoning has reached its limit."""
        limit = self._limit
        if progress.section is not _Section.REASONING or progress.forced or progress.num_tokens < limit.max_tokens:
            return progress
        return progress._replace(forced=limit.closing[min(progress.matched, len(limit.closing) - 1)])
