"""What a tokenizer.json may ask for, checked before the tokenizer's library reads it: that takes memory for the largest
id, and time for the longest token. Knows no library."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.models.checkpoint.files.tokenizer_json import Vocabulary
from penstock.service.text.tokenizer_config import TokenizerError

MAX_TOKEN_IDS = 1 << 22
"""Ids lie below it; the largest known vocabularies have a quarter of that."""
MAX_TOKEN_BYTES = 4096
"""Of a token's name; the longest known ones have a quarter of that."""
MAX_TOKEN_AREA = 1 << 29
"""The sum of the squares of the tokens' lengths: some tables hold all beginnings of a token."""
MAX_ADDED_TOKENS = 1 << 18
MAX_GROWTH = 64
"""How many times as long a text may become when it is normalized, or when tokens become text."""
_SHOWN = 40
_FETCH = "fetch it again"


class AddedToken(msgspec.Struct):
    """A token beside the model's vocabulary."""

    id: int
    content: str
    special: bool = False


class TokenizerModel(Vocabulary):
    """What splits words into tokens."""

    continuing_subword_prefix: str | None = None


class TokenizerJson(msgspec.Struct):
    """A tokenizer.json, as far as it is read."""

    model: TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: Any = None
    decoder: Any = None


def read_described(path: Path, data: bytes) -> TokenizerJson:
    """Raises ValueError where it is no valid JSON of a tokenizer, and TokenizerError where it asks for too much."""
    try:
        described = msgspec.json.decode(data, type=TokenizerJson)
        _check_growth(path, "normalizer", described.normalizer)
        _check_growth(path, "decoder", described.decoder)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    added = {token.content: token.id for token in described.added_tokens}
    if len(added) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"{path}: has {len(added):,} added_tokens, and may have {MAX_ADDED_TOKENS:,}: {_FETCH}")
    _check_ids(path, described.model.ids())
    _check_ids(path, added)
    check_names(path, (*described.model.ids(), *added))
    return described


def _check_ids(path: Path, ids: Mapping[str, int]) -> None:
    """Raises TokenizerError for an id that is out of bounds."""
    if not ids or (min(ids.values()) >= 0 and max(ids.values()) < MAX_TOKEN_IDS):
        return
    name, token_id = next(item for item in ids.items() if not 0 <= item[1] < MAX_TOKEN_IDS)
    raise TokenizerError(
        f"{path}: token {name[:_SHOWN]!r} has the id {token_id:,}, and ids must be 0 to {MAX_TOKEN_IDS - 1:,}: {_FETCH}"
    )


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raises TokenizerError for tokens that are too long, or together too long."""
    area = 0
    for name in names:
        # No character has more than four bytes.
        length = len(name) if len(name) <= MAX_TOKEN_BYTES // 4 else len(name.encode(errors="replace"))
        if length > MAX_TOKEN_BYTES:
            raise TokenizerError(
                f"{path}: token {name[:_SHOWN]!r}... has {length:,} bytes, and may have {MAX_TOKEN_BYTES:,}: {_FETCH}"
            )
        area += length * length
    if area > MAX_TOKEN_AREA:
        raise TokenizerError(f"{path}: its tokens are too long together: {_FETCH}")


def _check_growth(path: Path, field: str, described: Any) -> None:
    growth = 1.0
    for step in _steps(described):
        growth *= _growth(step)
        if growth > MAX_GROWTH:
            raise TokenizerError(f"{path}: {field} makes texts more than {MAX_GROWTH} times as long: {_FETCH}")


def _steps(described: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or a decoder, those inside sequences included."""
    if not isinstance(described, dict):
        return
    yield described
    for name in ("normalizers", "decoders"):
        inner = described.get(name)
        for step in inner if isinstance(inner, list) else ():
            yield from _steps(step)


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a step may make a text, beyond what Unicode's own forms do."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:
            return 1.0 + len(new)  # an expression may match between any two characters
        case {"type": "Prepend", "prepend": str(new)}:
            return max(1.0, len(new))
        case {"type": "Precompiled", "precompiled_charsmap": str(written)}:
            return max(1.0, _longest_mapping(written) / MAX_GROWTH)
    return 1.0


def _longest_mapping(written: str) -> int:
    """The longest text, in bytes, that SentencePiece's table has for a character."""
    table = base64.b64decode(written)
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
