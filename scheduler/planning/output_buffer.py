"""The output of one sequence: applies stop conditions, and holds tokens back while the text state does.

It does not know blocks or plans. A token is delivered at most once, in order, and never after the sequence's end.
"""

from collections.abc import Collection, Sequence

from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import (
    EngineFinishReason,
    Request,
    SequenceDelta,
    StopMatch,
    TextDelta,
    TextState,
)


class OutputBuffer:
    """Turns accepted tokens into the output that the caller sees."""

    def __init__(
        self,
        index: int,
        text: TextState,
        stop_token_ids: Sequence[int],
        min_tokens: int,
        max_tokens: int,
        num_top_logprobs: int | None,
        end_token_ids: Collection[int] = (),
        *,
        measures_text: bool = False,
    ) -> None:
        """``measures_text``: whether deltas have ``text_lengths`` without log-probabilities. ``end_token_ids`` are stop
        tokens that end the sequence even before ``min_tokens``. In that case the grammar allowed no other token, so
        this one is neither counted nor shown."""
        self.index = index
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens chosen so far."""
        self.end: StopMatch | None = None
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._held: list[int] = []
        self._num_in_end = 0
        """The number of tokens that ended the sequence: a stop token, or those of a stop string."""
        self._held_logprobs = None if num_top_logprobs is None else TokenLogprobs(num_top_logprobs, [], [], [])
        self._measures = measures_text or num_top_logprobs is not None
        self._lengths: list[int] = []
        """The number of characters of the text that begin in each of the oldest tokens of ``_held``, where known."""

    @property
    def num_in_text(self) -> int:
        """The number of tokens that were released with text; excludes the tokens that ended the sequence."""
        return self.num_tokens - len(self._held) - self._num_in_end

    def take_tokens(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> SequenceDelta | None:
        """Returns the output that a step's tokens release, or None. If one of them ends the sequence, sets ``end`` and
        ignores the rest."""
        assert self.end is None
        num_released = num_kept = 0
        text = ""
        for token_id in token_ids:
            end = self._end_at(token_id) if token_id in self._stop_token_ids else None
            if end is None or end.stop_token_id is not None:
                num_kept += 1
                self.num_tokens += 1
                self._held.append(token_id)
            if end is not None:
                released = self._end(end)
            else:
                released = self._text.feed(token_id)
                if self._measures:
                    self._lengths += released.text_lengths()
            num_more, more, stop, _ = released
            if self.num_tokens >= self.max_tokens and stop is None and self.end is None:
                num_released += num_more
                text += more
                num_more, more, stop, _ = self._end(StopMatch(EngineFinishReason.LENGTH))
            num_released += num_more
            text += more
            if stop is not None:  # even if it was complete only at the end
                self.end = StopMatch(EngineFinishReason.STOP, stop=stop)
            if self.end is not None:
                break
        if self._held_logprobs is not None:
            assert logprobs is not None, "a result lacks the log-probabilities that its row needs"
            self._held_logprobs.extend(logprobs.part(0, num_kept))
        return self._release(num_released, text)

    def _end_at(self, token_id: int) -> StopMatch | None:
        """Returns how a stop token ends the sequence; None if it comes before ``min_tokens`` and is output as well."""
        if self.num_tokens >= self._min_tokens:
            return StopMatch(EngineFinishReason.STOP, stop_token_id=token_id)
        return StopMatch(EngineFinishReason.STOP) if token_id in self._end_token_ids else None

    def cut(self, reason: EngineFinishReason = EngineFinishReason.LENGTH) -> SequenceDelta:
        """Ends a sequence that gets no more tokens, and releases those that are held back. A stop string that is
        complete only now ends the text."""
        assert self.end is None
        released = self._end(StopMatch(reason))
        if released.stop is not None:
            self.end = StopMatch(EngineFinishReason.STOP, stop=released.stop)
        delta = self._release(released.num_tokens, released.text)
        assert delta is not None
        return delta

    def flush(self) -> SequenceDelta | None:
        """Releases the tokens that are held back, before others are injected: what follows is a text of its own. Sets
        ``end`` if a stop string is complete only now."""
        assert self.end is None
        if not self.num_tokens:
            return None
        released = self._text.finish()
        if self._measures:
            self._lengths += released.text_lengths()
        if released.stop is not None:
            self.end = StopMatch(EngineFinishReason.STOP, stop=released.stop)
        self._text.restart()
        return self._release(released.num_tokens, released.text)

    def _end(self, end: StopMatch) -> TextDelta:
        self.end = end
        released = self._text.finish()
        if self._measures:
            self._lengths += released.text_lengths()
        return released

    def _release(self, num_released: int, text: str) -> SequenceDelta | None:
        if not (num_released or text or self.end):
            return None
        held = self._held
        if self.end is not None:  # the tokens that ended it count in its usage, and are delivered with it
            self._num_in_end = len(held) - num_released
            num_released = len(held)
        if num_released == len(held):
            shown, self._held = held, []
        else:
            shown, self._held = held[:num_released], held[num_released:]
        if not self._measures:
            return SequenceDelta(self.index, shown, text, None, self.end)
        lengths, self._lengths = self._lengths[:num_released], self._lengths[num_released:]
        lengths += [0] * (num_released - len(lengths))
        logprobs = self._held_logprobs
        if logprobs is None:
            return SequenceDelta(self.index, shown, text, None, self.end, lengths)
        self._held_logprobs = logprobs.part(num_released, len(logprobs.chosen))
        return SequenceDelta(self.index, shown, text, logprobs.part(0, num_released), self.end, lengths)


def new_output(request: Request, index: int, text: TextState, max_tokens: int) -> OutputBuffer:
    """Returns the empty output of a request's sequence ``index``."""
    return OutputBuffer(
        index,
        text,
        request.sampling.stop_token_ids,
        request.sampling.min_tokens,
        max_tokens,
        request.sampling.logprobs,
        request.grammar_end_ids,
        measures_text=request.measures_text,
    )


def resume_output(request: Request, index: int, token_ids: Sequence[int]) -> tuple[OutputBuffer, SequenceDelta | None]:
    """Returns the output of sequence ``index`` after tokens that another engine has chosen, and what they release. The
    log-probabilities are zeros: they are not known. ``num_tokens`` is less than the number of tokens if the output ends
    before the last one."""
    output = new_output(request, index, request.make_text(), request.max_tokens)
    num_top = request.sampling.logprobs
    logprobs = None
    if num_top is not None:
        num_tokens = len(token_ids)
        logprobs = TokenLogprobs(
            num_top, [0.0] * num_tokens, [0] * (num_top * num_tokens), [0.0] * (num_top * num_tokens)
        )
    delta = output.take_tokens(token_ids, logprobs) if token_ids else None
    return output, delta
