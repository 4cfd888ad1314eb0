"""Tables of the text of each token id, made once from a tokenizer's decoder, so that a token costs one look-up.

Covers the decoders that decoder-only models have: byte-level, SentencePiece's with and without byte fallback, and none.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from penstock.models.checkpoint.tokenizer.parts import byte_letters


class UnsupportedDecoder(Exception):
    """A decoder that cannot be converted to tables. The text names it."""


class TokenTextTable:
    """The tables. A token is whole characters, or bytes that form a character with the tokens around it."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, vocab_size: int, special_ids: frozenset[int], decoder: Any
    ) -> None:
        """``decoder`` is the parsed one of tokenizer.json. Raises UnsupportedDecoder."""
        rules = _Rules(decoder)
        tokens = [tokenizer.id_to_token(token_id) for token_id in range(vocab_size)]
        self._tokens = tokens
        self._opening = rules.opening
        self.opens_differently = rules.opening is not None
        """Whether ``opening`` returns the text of the first token."""
        self.num_stripped = rules.num_stripped
        """The number of spaces that are stripped from the beginning of a whole text."""
        self.decodes_runs = rules.byte_fallback
        """Whether consecutive byte tokens are decoded together or not at all (``utf8.ByteRun``)."""
        pieces = ["" if token is None else rules.piece(token) for token in tokens]
        self.split = {token_id: piece for token_id, piece in enumerate(pieces) if isinstance(piece, bytes)}
        """The bytes of tokens that are not whole characters."""
        self.all = [piece if isinstance(piece, str) else None for piece in pieces]
        """The text of each token; None where it is in ``split``."""
        whole = max((len(text.encode()) for text in self.all if text is not None), default=0)
        broken = max((len(piece) for piece in self.split.values()), default=0)
        self.longest_bytes = max(whole, len("\ufffd".encode()) * broken)
        """The most bytes of UTF-8 that a token adds to a text. An invalid byte becomes U+FFFD."""
        self.unknown = frozenset(token_id for token_id, token in enumerate(tokens) if token is None)
        """Ids without a token, which add nothing to a text."""
        self.skipped = self.unknown | special_ids
        """Ids that add nothing to a text without special tokens."""
        self.ordinary = self.all.copy()
        """The same as ``all``, but with empty texts for ``skipped``."""
        for token_id in self.skipped:
            self.ordinary[token_id] = ""
        self._showing: dict[frozenset[int], list[str | None]] = {}

    def showing(self, special_ids: frozenset[int]) -> Sequence[str | None]:
        """Returns ``ordinary`` with the texts of these special tokens. Keeps each table: there are few such sets."""
        if not special_ids:
            return self.ordinary
        if special_ids not in self._showing:
            texts = self.ordinary.copy()
            for token_id in special_ids:
                texts[token_id] = self.all[token_id]
            self._showing[special_ids] = texts
        return self._showing[special_ids]

    def by_itself(self, token_id: int) -> bytes:
        """Returns the text of one token in UTF-8, or the name of a special token. It may be part of a character. Empty
        for an id without a token: a model may have more rows than its tokenizer has tokens."""
        if token_id >= len(self.all):
            return b""
        text = self.all[token_id]
        return self.split[token_id] if text is None else text.encode()

    def opening(self, token_id: int) -> str:
        """Returns the text of a token that is the first of a text, if ``opens_differently``."""
        token = self._tokens[token_id]
        assert token is not None, "ids without a token are skipped"
        assert self._opening is not None
        return self._opening(token)


class _Rules:
    """A decoder's description as rules for one token at a time."""

    def __init__(self, decoder: Any) -> None:
        self.byte_fallback = False
        self.num_stripped = 0
        self.opening: Callable[[str], str] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_of: Mapping[int, str] | None = None
        self._prefix = ""
        steps = _flatten(decoder)
        kinds = [step["type"] for step in steps]
        if not kinds:
            self._prefix = " "
            self.opening = str
        elif kinds == ["ByteLevel"]:
            self._byte_of = _byte_alphabet()
        elif kinds == ["Metaspace"]:
            mark = steps[0]["replacement"]
            self._replacements = [(mark, " ")]
            if steps[0].get("prepend_scheme", "always") != "never":
                self.opening = lambda token: token.replace(mark, "")
        elif _FROM_SENTENCEPIECE.fullmatch("".join(f"{kind} " for kind in kinds)):
            for step in steps:
                self._read(step)
        else:
            raise UnsupportedDecoder(" + ".join(kinds))

    def _read(self, step: Any) -> None:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replacements.append((old, new))
            case {"type": "ByteFallback"}:
                self.byte_fallback = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.num_stripped = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnsupportedDecoder(str(step))

    def piece(self, token: str) -> str | bytes:
        """Returns a token's text, or its bytes if they are not text by themselves."""
        if self._byte_of is not None:
            return _byte_level_piece(token, self._byte_of)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return self._prefix + token


_FROM_SENTENCEPIECE = re.compile("(Replace )*(ByteFallback )?Fuse (Strip )?")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_piece(token: str, byte_of: Mapping[int, str]) -> str | bytes:
    if token.isascii() and token.isprintable() and " " not in token:
        return token
    try:
        data = token.translate(byte_of).encode("latin-1")
    except UnicodeEncodeError:
        return token  # an added token, with characters that represent no byte
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_alphabet() -> Mapping[int, str]:
    """Returns the byte, as Latin-1, that a character represents, unless it represents itself. Characters below U+0100
    without a byte map to one that Latin-1 lacks."""
    letters = {byte: ord(letter) for byte, letter in byte_letters().items() if ord(letter) != byte}
    return dict.fromkeys(letters, "\uffff") | {letter: chr(byte) for byte, letter in letters.items()}


def _flatten(decoder: Any) -> Sequence[Any]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
