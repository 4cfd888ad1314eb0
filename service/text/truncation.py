"""Truncates prompts to the number of tokens that a request sets. Independent of the tokenizer."""

from dataclasses import dataclass

import penstock.v1 as pb
from penstock.service.errors import invalid

Truncated = pb.GenerationStart | pb.ClassifyRequest | pb.ScoreRequest | pb.EmbedRequest | pb.TokenizeRequest


@dataclass(frozen=True, slots=True)
class Truncation:
    """The number of a prompt's tokens to keep, and from which end."""

    max_tokens: int
    keeps_first: bool

    @classmethod
    def of(cls, request: Truncated, most: int, *, keeps_first: bool = False) -> "Truncation | None":
        """Returns the truncation that a request sets, or None. A prompt has at most ``most`` tokens; ``keeps_first`` is
        the method's default. Raises ServiceError."""
        if not request.HasField("truncate_prompt_tokens"):
            return None
        wanted = request.truncate_prompt_tokens
        if not wanted:
            raise invalid(
                "truncate_prompt_tokens", "must be at least 1, or -1 for the length of the model's context; it is 0"
            )
        if request.truncation_side:
            keeps_first = request.truncation_side == pb.TRUNCATION_SIDE_RIGHT
        return cls(most if wanted < 0 else min(wanted, most), keeps_first)

    def cut(self, token_ids: list[int]) -> list[int]:
        return token_ids[: self.max_tokens] if self.keeps_first else token_ids[-self.max_tokens :]

    def cut_inside(self, token_ids: list[int], text_ids: list[int]) -> list[int]:
        """Truncates a text's tokens and keeps the special ones that a tokenizer adds around them. ``text_ids``: the
        tokens without those."""
        num_around = len(token_ids) - len(text_ids)
        num_kept = self.max_tokens - num_around
        begins = (at for at in range(num_around + 1) if token_ids[at : at + len(text_ids)] == text_ids)
        begin = next(begins, None)
        if begin is None or num_kept < 1:
            return self.cut(token_ids)
        inside = text_ids[:num_kept] if self.keeps_first else text_ids[-num_kept:]
        return [*token_ids[:begin], *inside, *token_ids[begin + len(text_ids) :]]
