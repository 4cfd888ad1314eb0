"""Converts a SentencePiece model, tokenizer.model, to a tokenizer.json that gives the same ids."""

import base64
import math
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken

from penstock.models.checkpoint.tokenizer import sentencepiece
from penstock.models.checkpoint.tokenizer.parts import NamedToken, Part, added_token, bpe, find_merges, surround
from penstock.models.checkpoint.tokenizer.sentencepiece import PieceKind
from penstock.service.text.conversion.described import ConversionError, DescribedTokenizer, flag
from penstock.service.text.conversion.sentencepiece_proto import parse_model
from penstock.service.text.tokenizer_bounds import MAX_TOKEN_IDS

_UNIGRAM, _BPE = 1, 2
_NFKC = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
"""The names of SentencePiece's own tables of replaced characters. All make texts NFKC; some do more."""
_UNREACHABLE = 1000.0
"""How much lower than all others the scores of tokens are that no text may have. The library has no other way to
exclude them."""


def convert_sentencepiece(
    content: bytes, fields: Mapping[str, Any], claimed: Mapping[int, AddedToken]
) -> DescribedTokenizer:
    """Returns the tokenizer. ``fields`` are those of tokenizer_config.json, and ``claimed`` its tokens by their ids.
    Raises ConversionError."""
    return _SentencePieceModel(content, claimed).described(fields)


class _SentencePieceModel:
    def __init__(self, content: bytes, claimed: Mapping[int, AddedToken]) -> None:
        try:
            model = parse_model(content)
        except DecodeError:
            raise ConversionError("is not a SentencePiece model") from None
        self._trainer, self._normalizer = model.trainer_spec, model.normalizer_spec
        self._check(len(model.pieces))
        try:
            self._tokens = [piece.piece.decode() for piece in model.pieces]
        except UnicodeDecodeError:
            raise ConversionError("has a token that is not UTF-8") from None
        self._scores = [piece.score for piece in model.pieces]
        self._kinds = [piece.type for piece in model.pieces]
        self._named_ids = self._find_named()
        self._rename(claimed)
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        if "" in self._ids or len(self._ids) < len(self._tokens):
            raise ConversionError("has an empty token, or a token twice")
        if not all(map(math.isfinite, self._scores)):
            raise ConversionError("has a token whose score is not a number")

    def _check(self, num_pieces: int) -> None:
        """Raises ConversionError for a model that cannot be converted."""
        if not num_pieces:
            raise ConversionError("is not a SentencePiece model")
        if num_pieces > MAX_TOKEN_IDS:
            raise ConversionError(f"has {num_pieces:,} tokens, and may have {MAX_TOKEN_IDS:,}")
        if self._trainer.model_type not in (_UNIGRAM, _BPE):
            raise ConversionError(
                f"has model_type {self._trainer.model_type}, and only unigram (1) and bpe (2) are supported"
            )
        if self._trainer.treat_whitespace_as_suffix or not self._normalizer.escape_whitespaces:
            raise ConversionError("has treat_whitespace_as_suffix, or no escape_whitespaces, which is not supported")

    def _find_named(self) -> dict[str, int]:
        """Returns the ids of the tokens with a name."""
        by_name = dict(zip(self._tokens, range(len(self._tokens)), strict=True))
        trainer = self._trainer
        pieces = {"bos_token": trainer.bos_piece, "eos_token": trainer.eos_piece, "pad_token": trainer.pad_piece}
        named = {name: piece.decode(errors="replace") for name, piece in pieces.items()}
        found = {name: by_name[piece] for name, piece in named.items() if piece in by_name}
        found = {name: token_id for name, token_id in found.items() if self._kinds[token_id] == PieceKind.CONTROL}
        unknown = next((token_id for token_id, kind in enumerate(self._kinds) if kind == PieceKind.UNKNOWN), None)
        return found if unknown is None else {**found, "unk_token": unknown}

    def _rename(self, claimed: Mapping[int, AddedToken]) -> None:
        """Gives placeholders the names that the configuration has for their ids, as transformers does."""
        known = set(self._tokens)
        for token_id, token in claimed.items():
            if token_id < len(self._tokens) and token.content not in known:
                self._tokens[token_id] = token.content
                self._kinds[token_id] = PieceKind.CONTROL if token.special else PieceKind.USER_DEFINED
                known.add(token.content)

    def described(self, fields: Mapping[str, Any]) -> DescribedTokenizer:
        has_prefix = flag(fields, "add_prefix_space", self._normalizer.add_dummy_prefix)
        trims = self._normalizer.remove_extra_whitespaces
        is_unigram = self._trainer.model_type == _UNIGRAM
        symbols = self._of_kind(PieceKind.USER_DEFINED)
        begin = self._named("bos_token") if flag(fields, "add_bos_token", True) else None
        end = self._named("eos_token") if flag(fields, "add_eos_token", False) else None
        written: Part = {
            "version": "1.0",
            "added_tokens": self._added(),
            "normalizer": sentencepiece.normalizer(
                has_prefix,
                symbols,
                charsmap=base64.b64encode(self._normalizer.precompiled_charsmap).decode(),
                is_nfkc=self._normalizer.name.decode(errors="replace") in _NFKC,
                trims=trims,
            ),
            "pre_tokenizer": sentencepiece.SPLIT_BYTE_NAMES if is_unigram and self._has_bytes else None,
            "post_processor": surround(begin, end),
            "decoder": sentencepiece.decoder(has_prefix, self._has_bytes),
            "model": self._unigram() if is_unigram else self._bpe(),
        }
        return DescribedTokenizer(written, {name: self._tokens[token_id] for name, token_id in self._named_ids.items()})

    @property
    def _has_bytes(self) -> bool:
        return bool(self._trainer.byte_fallback)

    def _unigram(self) -> Part:
        matched = (PieceKind.NORMAL, PieceKind.USER_DEFINED)
        scores = [score for score, kind in zip(self._scores, self._kinds, strict=True) if kind == PieceKind.NORMAL]
        lowest = min(scores, default=0.0) - _UNREACHABLE
        vocab = [
            (token, score if kind in matched else lowest)
            for token, score, kind in zip(self._tokens, self._scores, self._kinds, strict=True)
        ]
        unknown = self._named("unk_token")
        if unknown is None:
            raise ConversionError("has no token for unknown characters")
        return {"type": "Unigram", "unk_id": unknown[1], "vocab": vocab, "byte_fallback": self._has_bytes}

    def _bpe(self) -> Part:
        normal = self._of_kind(PieceKind.NORMAL)
        try:
            merges = find_merges(normal, ((token, self._scores[token_id]) for token, token_id in normal.items()))
        except ValueError as error:
            raise ConversionError(str(error)) from None
        unknown = self._named("unk_token")
        unk_token = None if unknown is None else unknown[0]
        return bpe(self._ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=self._has_bytes)

    def _of_kind(self, kind: PieceKind) -> dict[str, int]:
        return {token: token_id for token, token_id in self._ids.items() if self._kinds[token_id] == kind}

    def _added(self) -> list[Part]:
        special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
        return [
            added_token(token_id, token, kind in special, normalized=kind == PieceKind.USER_DEFINED)
            for token_id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True))
            if kind in special or kind == PieceKind.USER_DEFINED
        ]

    def _named(self, name: str) -> NamedToken | None:
        token_id = self._named_ids.get(name)
        return None if token_id is None else (self._tokens[token_id], token_id)
