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

    __slots__ = (
        "_held",
        "_held_logprobs",
        "_min_tokens",
        "_stop_token_ids",
        "_text",
        "end",
        "index",
        "max_tokens",
        "num_delivered",
        "num_tokens",
    )

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
        self.num_delivered = 0
        """Those that were let go."""
        self.end: Matched | None = None
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._held: list[int] = []
        self._held_logprobs = None if num_top_logprobs is None else HeldLogprobs(num_top_logprobs)

    def take(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> Delta | None:
        """What a step's tokens let go, or None. If one of them ends the choice, ``end`` is set; the rest is ignored."""
        assert self.end is None
        num_released = 0
        text = ""
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if token_id in self._stop_token_ids and self.num_tokens > self._min_tokens:
                num_more, more, stop = self._end(Matched(FinishReason.STOP, stop_token_id=token_id))
            else:
                self._held.append(token_id)
                if self._held_logprobs is not None:
                    assert logprobs is not None, "an answer lacks the log-probabilities that its row asked for"
                    self._held_logprobs.add(logprobs, index)
                num_more, more, stop = self._text.feed(token_id)
            num_released += num_more
            text += more
            if self.num_tokens >= self.max_tokens and stop is None and self.end is None:
                num_more, more, stop = self._end(Matched(FinishReason.LENGTH))
                num_released += num_more
                text += more
            if stop is not None:  # also one that was complete only at the end
                self.end = Matched(FinishReason.STOP, stop=stop)
            if self.end is not None:
                break
        return self._release(num_released, text)

    def cut(self) -> Delta:
        """Ends the choice, which has as many tokens as it may have, and lets go what is held back."""
        assert self.end is None
        num_released, text, stop = self._end(Matched(FinishReason.LENGTH))
        if stop is not None:
            self.end = Matched(FinishReason.STOP, stop=stop)
        delta = self._release(num_released, text)
        assert delta is not None
        return delta

    def _end(self, end: Matched) -> Released:
        self.end = end
        return self._text.finish()

    def _release(self, num_released: int, text: str) -> Delta | None:
        if not (num_released or text or self.end):
            return None
        held = self._held
        if num_released == len(held):
            shown, self._held = held, []
        else:
            shown, self._held = held[:num_released], held[num_released:]
        self.num_delivered += num_released
        logprobs = None if self._held_logprobs is None else self._held_logprobs.release(num_released)
        return Delta(self.index, shown, text, logprobs, self.end)
