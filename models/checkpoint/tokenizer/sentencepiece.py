"""The parts of a tokenizer.json that reproduce SentencePiece, for its own files and for GGUF files."""

import re
from collections.abc import Collection
from enum import IntEnum

from penstock.models.checkpoint.tokenizer.parts import Part

SPACE = "▁"
"""Stands for a space inside tokens."""
_PROTECTED, _PROTECTION = "\uff5e", "\U0001fffe"
"""The one character that Unicode's NFKC changes and SentencePiece's does not, and what stands for it meanwhile."""
_SEPARATED = (
    "(?<=[\u2581\ufffd\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u08ca-\u08ff\u0e38-\u0e3a])(?=\\p{M})"
)
_SEPARATOR = "\U0001ffff"
"""Inserted before marks that would be lost, or whose usual order (Hebrew, Arabic, Thai) NFKC changes and
SentencePiece's table does not."""

SPLIT_BYTE_NAMES: Part = {
    "type": "Split",
    "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
"""A pre-tokenizer that cuts text which looks like the name of a byte's token. A Unigram model could take it for one."""


class PieceKind(IntEnum):
    """The kinds of tokens, by the numbers of SentencePiece's files and of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def normalizer(
    has_prefix: bool, symbols: Collection[str] = (), charsmap: str = "", is_nfkc: bool = False, trims: bool = False
) -> Part:
    """Returns the normalizer. ``has_prefix``: a text gets a space at its beginning, unless it is one of ``symbols``,
    the added tokens that are normalized themselves. ``charsmap``: the table of replaced characters, in base64.
    ``is_nfkc``: the table is Unicode's NFKC, perhaps with more. ``trims``: spaces at both ends and repeated spaces are
    dropped."""
    steps: list[Part] = []
    if charsmap:
        if is_nfkc:
            # The library's ``Precompiled`` does not compose all characters that SentencePiece composes.
            steps += [_replace(_PROTECTED, _PROTECTION), _replace_all(_SEPARATED, _SEPARATOR), {"type": "NFKC"}]
            steps.append(_replace(_PROTECTION, _PROTECTED))
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
        if is_nfkc:
            steps.append(_replace(_SEPARATOR, ""))
    if trims:
        steps += [_replace_all(" {2,}", " "), _replace_all(r"\A ", "")]
    if has_prefix and symbols:
        unprefixed = "|".join(re.escape(symbol) for symbol in ("", *sorted(symbols)))
        steps.append(_replace_all(rf"\A(?!(?:{unprefixed})\z)", SPACE))
    elif has_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace(" ", SPACE))
    if trims:
        # Only from the beginning of a run, or the time would be quadratic in its length.
        steps.append(_replace_all(rf"(?<!{SPACE})(?>{SPACE}+)\z", ""))
    return steps[0] if len(steps) == 1 else {"type": "Sequence", "normalizers": steps}


def decoder(strips_prefix: bool, has_bytes: bool = True) -> Part:
    """Returns the decoder. ``strips_prefix``: the space at the beginning of a text is dropped. ``has_bytes``: there are
    tokens for bytes."""
    steps = [_replace(SPACE, " ")]
    if has_bytes:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if strips_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(old: str, new: str) -> Part:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _replace_all(pattern: str, new: str) -> Part:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}
