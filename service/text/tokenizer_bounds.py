"""Limits on a tokenizer.json, checked before the tokenizers library reads it: the library takes memory in proportion to
the largest id, and time in proportion to the longest token."""

import base64
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.models.checkpoint.files.tokenizer_json import Vocabulary
from penstock.service.text.charsmap import check_charsmap, longest_replacement
from penstock.service.text.tokenizer_config import TokenizerError

MAX_TOKEN_IDS = 1 << 22
"""Limit on ids; the largest known vocabularies have a quarter of that."""
MAX_TOKEN_BYTES = 4096
"""Limit on a token's name; the longest known ones have a quarter of that."""
MAX_TOKEN_AREA = 1 << 29
"""Limit on the sum of the squares of the tokens' lengths: some tables hold all prefixes of a token."""
MAX_ADDED_TOKENS = 1 << 18
MAX_GROWTH = 64
"""Limit on the factor by which a text may grow when it is normalized, or when tokens become text."""
_SHOWN = 40
_FETCH = "fetch it again"


class AddedToken(msgspec.Struct):
    """A token outside the model's vocabulary."""

    id: int
    content: str
    special: bool = False


class TokenizerModel(Vocabulary):
    """The part that splits words into tokens."""

    continuing_subword_prefix: str | None = None


class TokenizerJson(msgspec.Struct):
    """The parts of a tokenizer.json that are read here."""

    model: TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: Any = None
    decoder: Any = None


def read_described(path: Path, data: bytes) -> TokenizerJson:
    """Parses a tokenizer.json. Raises ValueError if it is not valid, and TokenizerError if it exceeds a limit."""
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
    """Raises TokenizerError for tokens that are too long, each or in total."""
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
    """Yields the steps of a normalizer or a decoder, including those inside sequences."""
    if not isinstance(described, dict):
        return
    yield described
    for name in ("normalizers", "decoders"):
        inner = described.get(name)
        for step in inner if isinstance(inner, list) else ():
            yield from _steps(step)


def _growth(step: Mapping[str, Any]) -> float:
    """Returns the factor by which a step may lengthen a text, apart from Unicode's normalization forms. Raises
    ValueError."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:
            return 1.0 + len(new)  # a regular expression may match between any two characters
        case {"type": "Prepend", "prepend": str(new)}:
            return max(1.0, len(new))
        case {"type": "Precompiled", "precompiled_charsmap": str(written)}:
            table = base64.b64decode(written)
            check_charsmap(table)
            return max(1.0, longest_replacement(table) / MAX_GROWTH)
    return 1.0
