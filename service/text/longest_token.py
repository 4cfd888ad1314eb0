"""Computes how much text one token can represent, for tokenizers that lose no text."""

from collections.abc import Container, Set as AbstractSet

import tokenizers
from tokenizers import models, pre_tokenizers


def longest_token_bytes(
    library: tokenizers.Tokenizer, names: AbstractSet[str], special_ids: Container[int]
) -> int | None:
    """Returns the most bytes of a caller's text that one token represents. ``names`` are those of all tokens; tokens in
    ``special_ids`` represent no text.

    None if it is unknown, because a normalizer, an unknown token or a token that includes the spaces around it may
    remove any amount of text. It is known for byte-level BPE, which most models have: there, each character of a
    token's name is a byte.
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
    """Returns whether a pre-tokenizer splits a text without loss and then maps its bytes to characters."""
    *before, last = step if isinstance(step, pre_tokenizers.Sequence) else [step]  # type: ignore[misc]
    return isinstance(last, pre_tokenizers.ByteLevel) and all(
        isinstance(each, pre_tokenizers.Digits)
        or (isinstance(each, pre_tokenizers.Split) and each.behavior != "removed")
        for each in before
    )
