"""What conversions return and raise, and what those of byte-level tokenizers share."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.models.checkpoint.tokenizer.parts import (
    BYTE_LEVEL_DECODER,
    NamedToken,
    Part,
    added_token,
    bpe,
    find_merges,
    split_words,
    surround,
)


class ConversionError(Exception):
    """A file that cannot be converted. The text continues a sentence that begins with the file's name."""


@dataclass(frozen=True)
class DescribedTokenizer:
    """A tokenizer in the form of a model's own files."""

    tokenizer_json: Part
    named: Mapping[str, str]
    """Tokens with a name, such as eos_token, that tokenizer_config.json may leave out."""


def byte_level_tokenizer(
    vocab: Mapping[str, int],
    added: Mapping[str, int],
    special: Collection[str],
    pattern: str,
    begin: NamedToken | None = None,
    end: NamedToken | None = None,
) -> Part:
    """Returns a tokenizer.json in which the tokens of ``vocab`` with lower ids are merged first, as tiktoken does.

    ``added``: tokens that are found before a text is cut into words, and those of them that are ``special``.
    ``pattern`` finds the words. ``begin`` and ``end`` are added to a text. Raises ConversionError.
    """
    if clash := next((name for name in added if name in vocab), None):
        raise ConversionError(f"has the special token {clash[:60]!r} among the others too")
    try:
        merges = find_merges(vocab, ((token, -token_id) for token, token_id in vocab.items()))
    except ValueError as error:
        raise ConversionError(str(error)) from None
    return {
        "version": "1.0",
        "added_tokens": [added_token(token_id, name, name in special) for name, token_id in added.items()],
        "normalizer": None,
        "pre_tokenizer": split_words(pattern),
        "post_processor": surround(begin, end),
        "decoder": BYTE_LEVEL_DECODER,
        # A word that is a token is not built from smaller ones.
        "model": bpe({**vocab, **added}, merges, ignore_merges=True),
    }


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns a field of tokenizer_config.json that is true or false."""
    value = fields.get(name)
    return value if isinstance(value, bool) else default
