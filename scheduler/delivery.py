"""One choice's tokens on their way out: stop conditions, and what the text state still holds back.

Knows neither blocks nor plans. A token is delivered at most once, in order, and never after the choice's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import Delta, FinishReason, Matched, Released, TextState


@dataclass(slots=True)
class HeldLogprobs:
    """Log-probabilities of the tokens that are held back; flat, as they travel."""

    num_top: int
    chosen: list[float] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top: list[float] = field(default_factory=list)

    def add(self, logprobs: TokenLogprobs, index: int) -> None:
        """Takes entry ``index`` of an answer."""
        span = slice(index * self.num_top, (index + 1) * self.num_top)
        self.chosen.append(logprobs.chosen[index])
        self.top_token_ids += logprobs.top_token_ids[span]
        self.top += logprobs.top[span]

    def release(self, num_tokens: int) -> TokenLogprobs:
        """Gives the oldest ``num_tokens`` entries."""
        num_entries = num_tokens * self.num_top
        released = TokenLogprobs(
            self.num_top, self.chosen[:num_tokens], self.top_token_ids[:num_entries], self.top[:num_entries]
        )
        del self.chosen[:num_tokens], self.top_token_ids[:num_entries], self.top[:num_entries]
        return released


class Delivery:
    """Turns accepted tokens into what the caller sees of them."""

    __slots__ = ("_held", "_held_logprobs", "_min_tokens", "_stop_token_ids", "_text", "end", "index", "max_tokens", "num_tokens")

    def __init__(
        self,
        index: int,
        text: TextState,
        stop_token_ids: Sequence[int],
        min_tokens: int,
        max_tokens: int,
        num_top_logprobs: int | None,
    ) -> None:
        self.index = index
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens chosen so far, those that are never shown included."""
        self.end: Matched | None = None
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._held: list[int] = []
        self._held_logprobs = None if num_top_logprobs is None else HeldLogprobs(num_top_logprobs)

    def take(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> Delta | None:
        """What a step's tokens let go, or None; ``end`` is set if one of them ended the choice, and the rest ignored."""
        assert self.end is None
        num_released = 0
        text = ""
        for index, token_id in enumerate(token_ids):
            released = self._take_one(token_id, logprobs, index)
            num_released += released.num_tokens
            text += released.text
            if self.end is not None:
                break
        if not (num_released or text or self.end):
            return None
        shown = self._held[:num_released]
        del self._held[:num_released]
        shown_logprobs = self._held_logprobs.release(num_released) if self._held_logprobs is not None else None
        return Delta(self.index, shown, text, shown_logprobs, self.end)

    def _take_one(self, token_id: int, logprobs: TokenLogprobs | None, index: int) -> Released:
        may_stop = self.num_tokens >= self._min_tokens
        self.num_tokens += 1
        if may_stop and token_id in self._stop_token_ids:
            self.end = Matched(FinishReason.STOP, stop_token_id=token_id)
            return self._text.finish()
        self._held.append(token_id)
        if self._held_logprobs is not None:
            assert logprobs is not None, "an answer lacks the log-probabilities that its row asked for"
            self._held_logprobs.add(logprobs, index)
        released = self._text.feed(token_id)
        if released.stop is not None:
            self.end = Matched(FinishReason.STOP, stop=released.stop)
        elif self.num_tokens >= self.max_tokens:
            self.end = Matched(FinishReason.LENGTH)
            rest = self._text.finish()
            return Released(released.num_tokens + rest.num_tokens, released.text + rest.text)
        return released
