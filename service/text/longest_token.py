"""How much text one token can stand for, of the tokenizers that lose nothing of a text. Knows no requests."""

from collections.abc import Container, Set as AbstractSet

import tokenizers
from tokenizers import models, pre_tokenizers


def longest_token_bytes(
    library: tokenizers.Tokenizer, names: AbstractSet[str], special_ids: Container[int]
) -> int | None:
    """The most bytes of a caller's text that a token stands for; ``names`` has those of all tokens, and none of
    ``special_ids`` stands for any.

    None where that can't be told: where a normalizer, an unknown token or a token that takes the spaces around it may
    make any amount of text vanish. What is left is byte-level BPE, as most models of today have it: there each
    character of a token's name is a byte.
    """
    all_added = library.get_added_tokens_decoder()
    added = [token for token_id, token in all_added.items() if token_id not in special_ids]
    vocabulary = names - {token.content for token in all_added.values()}
    if library.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not isinstance(library.model, models.BPE) or not vocabulary >= set(pre_tokenizers.ByteLevel.alphabet()):
        return None
    if not _is_byte_level(library.pre_tokenizer):
        return None
    return max([len(name) for name in vocabulary] + [len(token.content.encode()) for token in added])


def _is_byte_level(step: object) -> bool:
    """Whether it splits a text without loss and then names its bytes."""
    *before, last = step if isinstance(step, pre_tokenizers.Sequence) else [step]  # type: ignore[misc]
    return isinstance(last, pre_tokenizers.ByteLevel) and all(
        isinstance(each, pre_tokenizers.Digits)
        or (isinstance(each, pre_tokenizers.Split) and each.behavior != "removed")
        for each in before
    )
