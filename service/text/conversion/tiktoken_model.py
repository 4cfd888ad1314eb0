"""Converts a tiktoken.model of Moonshot AI (Kimi, Moonlight) to a tokenizer.json that gives the same ids as tiktoken.

The file has only tokens and their ranks. Which words a text has, and which special tokens there are, is in code beside
it that is never run. So these are written here, for the class that tokenizer_config.json names
(``TikTokenTokenizer`` in moonshotai/Kimi-K2-Instruct's tokenization_kimi.py).
"""

from base64 import b64decode
from collections.abc import Mapping

from tokenizers import AddedToken

from penstock.models.checkpoint.tokenizer.parts import byte_letters
from penstock.models.checkpoint.tokenizer.words import KIMI_K2
from penstock.service.text.conversion.described import ConversionError, DescribedTokenizer, byte_level_tokenizer
from penstock.service.text.tokenizer_bounds import MAX_ADDED_TOKENS, MAX_TOKEN_IDS

_CLASS = "TikTokenTokenizer"
_NUM_BYTES, _NUM_SPECIAL = 256, 256
_NAMES = {"bos_token": "[BOS]", "eos_token": "[EOS]"}
"""The class's defaults."""


def convert_tiktoken(content: bytes, tokenizer_class: object, decoder: Mapping[int, AddedToken]) -> DescribedTokenizer:
    """Returns the tokenizer. ``tokenizer_class`` and ``decoder``, the added tokens by their ids, are those of
    tokenizer_config.json. Raises ConversionError."""
    if tokenizer_class != _CLASS:
        given = repr(tokenizer_class)[:60]
        raise ConversionError(f"is read only with the tokenizer_class {_CLASS} in tokenizer_config.json, not {given}")
    vocab = _vocabulary(content)
    special = _special_tokens(len(vocab), decoder)
    ids = {token.content: token_id for token_id, token in enumerate(special, len(vocab))}
    written = byte_level_tokenizer(vocab, ids, {token.content for token in special if token.special}, KIMI_K2)
    return DescribedTokenizer(written, {name: token for name, token in _NAMES.items() if token in ids})


def _vocabulary(content: bytes) -> dict[str, int]:
    """Returns the ids of the tokens, whose bytes are written as letters. Raises ConversionError."""
    letters = byte_letters()
    vocab: dict[str, int] = {}
    lines = content.splitlines()
    if len(lines) > MAX_TOKEN_IDS:
        raise ConversionError(f"has {len(lines):,} lines, and may have {MAX_TOKEN_IDS:,}")
    for number, line in enumerate(lines):
        try:
            token, rank = line.split()
            name = b64decode(token, validate=True).decode("latin-1").translate(letters)
        except ValueError:
            raise ConversionError(f"has a line {number + 1:,} that is not a token in base64 and its rank") from None
        if rank != b"%d" % number:
            raise ConversionError(f"has a line {number + 1:,} whose rank is not {number:,}")
        if name in vocab:
            raise ConversionError(f"has a token twice, the second time in line {number + 1:,}")
        vocab[name] = number
    missing = _NUM_BYTES - sum(letter in vocab for letter in letters.values())
    if missing:
        raise ConversionError(f"lacks {missing} of the {_NUM_BYTES} bytes")
    return vocab


def _special_tokens(first: int, decoder: Mapping[int, AddedToken]) -> list[AddedToken]:
    """Returns the tokens with ids from ``first`` on: those of ``decoder``, and reserved ones between them. Raises
    ConversionError."""
    end = max([first + _NUM_SPECIAL, *(token_id + 1 for token_id in decoder)])
    if end - first > MAX_ADDED_TOKENS:
        raise ConversionError(f"has {first:,} tokens, and tokenizer_config.json adds one with the id {end - 1:,}")
    if own := next((token_id for token_id in decoder if token_id < first), None):
        raise ConversionError(f"has {first:,} tokens, and tokenizer_config.json adds one with the id {own:,}")
    reserved = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(first, end)}
    tokens = [decoder.get(token_id) or AddedToken(name, special=True) for token_id, name in reserved.items()]
    if len({token.content for token in tokens}) < len(tokens):
        raise ConversionError("has a special token in tokenizer_config.json twice")
    return tokens
