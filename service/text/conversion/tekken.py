"""Converts Mistral's tekken.json to a tokenizer.json that gives the same ids as mistral-common."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.models.checkpoint.tokenizer.parts import byte_letters
from penstock.service.text.conversion.described import (
    ConversionError,
    DescribedTokenizer,
    byte_level_tokenizer,
    flag,
)
from penstock.service.text.tokenizer_bounds import MAX_ADDED_TOKENS, MAX_TOKEN_IDS

_NUM_BYTES = 256
_FIRST_VERSIONS = ("v1", "v2", "v3", "v7")
"""The versions whose files may leave out the special tokens."""
_FIRST_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Their special tokens, in the order of the ids (mistral-common's ``DEPRECATED_SPECIAL_TOKENS``)."""
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class _RankedToken(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _RankedSpecialToken(msgspec.Struct):
    rank: int
    token_str: str


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str | None = None


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_RankedToken]
    special_tokens: list[_RankedSpecialToken] | None = None


def convert_tekken(content: bytes, fields: Mapping[str, Any]) -> DescribedTokenizer:
    """Returns the tokenizer. ``fields`` are those of tokenizer_config.json. Raises ConversionError."""
    try:
        tekken = msgspec.json.decode(content, type=_Tekken)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConversionError(f"is not valid ({' '.join(str(error).split())[:120]})") from None
    num_special = _check_sizes(tekken)
    special = _special_tokens(tekken, num_special)
    vocab = _vocabulary(tekken, num_special)
    ids = {name: token_id for token_id, name in enumerate(special)}
    begin = ("<s>", ids["<s>"]) if "<s>" in ids and flag(fields, "add_bos_token", True) else None
    end = ("</s>", ids["</s>"]) if "</s>" in ids and flag(fields, "add_eos_token", False) else None
    written = byte_level_tokenizer(vocab, ids, ids.keys(), tekken.config.pattern, begin, end)
    return DescribedTokenizer(written, {name: token for name, token in _NAMES.items() if token in ids})


def _check_sizes(tekken: _Tekken) -> int:
    """Returns the number of special tokens. Raises ConversionError."""
    num_special, num_tokens = tekken.config.default_num_special_tokens, tekken.config.default_vocab_size
    if not 0 <= num_special <= MAX_ADDED_TOKENS:
        raise ConversionError(
            f"has config.default_num_special_tokens {num_special:,}, and may have {MAX_ADDED_TOKENS:,}"
        )
    if not num_special + _NUM_BYTES <= num_tokens <= min(num_special + len(tekken.vocab), MAX_TOKEN_IDS):
        raise ConversionError(
            f"has config.default_vocab_size {num_tokens:,}, which does not fit {len(tekken.vocab):,} tokens in vocab "
            f"and {num_special:,} special ones"
        )
    return num_special


def _special_tokens(tekken: _Tekken, num_special: int) -> Sequence[str]:
    """Returns the special tokens by their ids. Raises ConversionError."""
    if tekken.special_tokens is not None:
        listed = sorted(tekken.special_tokens, key=lambda token: token.rank)
        if [token.rank for token in listed] != list(range(len(listed))):
            raise ConversionError("has special_tokens whose ranks are not 0, 1, 2 and so on")
        names = [token.token_str for token in listed]
    elif tekken.config.version in _FIRST_VERSIONS:
        names = [*_FIRST_SPECIAL]
    else:
        raise ConversionError(f"lacks special_tokens, which version {str(tekken.config.version)[:20]} needs")
    if len(names) > num_special:
        raise ConversionError(
            f"has {len(names):,} special_tokens, and config.default_num_special_tokens is {num_special:,}"
        )
    names += (f"<SPECIAL_{token_id}>" for token_id in range(len(names), num_special))
    if "" in names or len(set(names)) < len(names):
        raise ConversionError("has an empty special token, or one twice")
    return names


def _vocabulary(tekken: _Tekken, num_special: int) -> dict[str, int]:
    """Returns the ids of the other tokens, whose bytes are written as letters. Raises ConversionError."""
    tokens = tekken.vocab[: tekken.config.default_vocab_size - num_special]
    if any(token.rank != rank for rank, token in enumerate(tokens)):
        raise ConversionError("has tokens in vocab whose ranks are not 0, 1, 2 and so on")
    if any(token.token_bytes != bytes([rank]) for rank, token in enumerate(tokens[:_NUM_BYTES])):
        raise ConversionError(f"has a vocab that does not begin with the {_NUM_BYTES} bytes")
    letters = byte_letters()
    vocab = {
        token.token_bytes.decode("latin-1").translate(letters): num_special + rank for rank, token in enumerate(tokens)
    }
    if "" in vocab or len(vocab) < len(tokens):
        raise ConversionError("has an empty token in vocab, or one twice")
    return vocab
