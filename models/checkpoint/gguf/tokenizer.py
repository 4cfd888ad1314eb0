"""Converts a GGUF file's metadata to the tokenizer files that a model's directory would have. Imports no tokenizer
library; the reader of the files checks them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.models.checkpoint.gguf.header import damaged, read_header
from penstock.models.checkpoint.gguf.metadata import ARCHITECTURE
from penstock.models.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from penstock.models.checkpoint.tokenizer import sentencepiece
from penstock.models.checkpoint.tokenizer.parts import (
    BYTE_LEVEL_DECODER,
    NamedToken,
    Part,
    added_token,
    bpe,
    find_merges,
    surround,
)
from penstock.models.checkpoint.tokenizer.sentencepiece import SPACE, PieceKind
from penstock.models.errors import ModelError

_KEY = "tokenizer.ggml."
_END_OF_TURN = {
    "</s>", "<EOT>", "<eos>", "<end_of_turn>", "<end_of_utterance>", "<|call|>", "<|end_of_text|>", "<|endoftext|>",
    "<turn|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|return|>",
}  # fmt: skip
"""Control tokens that end an output although a file may name only one of them, as in llama.cpp."""
_GEMMA4 = "gemma4"
_BEGIN_OF_TOOL_RESPONSE = "<|tool_response>"
"""The token at which Gemma 4 stops for the result of a tool. It is not a control token in its files."""


def write_tokenizer(path: Path, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json. Raises ModelError."""
    for name, content in tokenizer_files(path).items():
        (directory / name).write_bytes(msgspec.json.encode(content))


def tokenizer_files(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the content of each file of the tokenizer of a GGUF file. Raises ModelError."""
    return _Tokenizer(path).files()


class _Tokenizer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = read_header(path, long_arrays=True).metadata
        self._model: str | None = self._value("model", str, None)
        self._tokens: list[str] = self._list("tokens", str)
        if len(set(self._tokens)) < len(self._tokens):
            raise damaged(path, f"{_KEY}tokens has a token twice")
        kinds = self._optional_list("token_type", int)
        self._kinds: list[int] = [PieceKind.NORMAL] * len(self._tokens) if kinds is None else kinds

    def files(self) -> dict[str, dict[str, Any]]:
        model = self._model
        makers: Mapping[str | None, Callable[[], Part]] = {
            _GEMMA4: self._sentencepiece,
            "gpt2": self._byte_level,
            "llama": self._sentencepiece,
        }
        if model not in makers:
            raise ModelError(
                f"{self._path}: {_KEY}model is {str(model)[:60]!r}, and must be gemma4, gpt2 or llama: use the model's "
                "safetensors version"
            )
        described = makers[model]()
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        named = {name: token for name, key in names.items() if (token := self._named(key)) is not None}
        ends = {self._id(key) for key in ("eos", "eot", "eom")} - {None}
        ends |= {
            token_id
            for token_id, token in enumerate(self._tokens)
            if (token in _END_OF_TURN and self._kinds[token_id] == PieceKind.CONTROL)
            or (token == _BEGIN_OF_TOOL_RESPONSE and model == _GEMMA4)
        }
        config = {**named, **self._templates()}
        return {
            "tokenizer.json": {"version": "1.0", "added_tokens": self._added(), **described},
            "tokenizer_config.json": config,
            "generation_config.json": {"eos_token_id": sorted(end for end in ends if end is not None)},
        }

    def _byte_level(self) -> Part:
        name = self._value("pre", str, "gpt-2")
        name = "gpt-2" if name == "default" else name
        if name not in PRE_TOKENIZERS:
            raise ModelError(
                f"{self._path}: {_KEY}pre is {name[:60]!r}, and this way to cut texts into words is not supported: use "
                "the model's safetensors version"
            )
        words = PRE_TOKENIZERS[name]
        merges = self._merges()
        if merges is None:
            raise damaged(self._path, f"{_KEY}merges is missing")
        model = self._bpe(merges, ignore_merges=words.ignore_merges)
        return {
            "normalizer": words.normalizer,
            "pre_tokenizer": words.part,
            "post_processor": self._around(words.adds_bos),
            "decoder": BYTE_LEVEL_DECODER,
            "model": model,
        }

    def _sentencepiece(self) -> Part:
        is_gemma = str(self._metadata.get(ARCHITECTURE)).startswith("gemma")
        if is_gemma:
            # Runs of spaces are in the file as such.
            self._tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in self._tokens]
        merges = self._merges()
        if merges is None:
            # Gemma's merges are in the order of its tokens, whatever their scores are.
            scores = [-float(index) for index in range(len(self._tokens))]
            merges = self._found_merges(scores if is_gemma else self._list("scores", float))
        has_prefix = self._value("add_space_prefix", bool, not is_gemma) and self._model != _GEMMA4
        return {
            "normalizer": sentencepiece.normalizer(has_prefix),
            "pre_tokenizer": None,
            "post_processor": self._around(True),
            "decoder": sentencepiece.decoder(has_prefix),
            "model": self._bpe(
                merges,
                unk_token=self._named("unknown"),
                fuse_unk=True,
                byte_fallback=PieceKind.BYTE in self._kinds,
            ),
        }

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> Part:
        return bpe({token: token_id for token_id, token in enumerate(self._tokens)}, merges, **options)

    def _merges(self) -> list[tuple[str, str]] | None:
        """The merges in the file; None if it has none."""
        if f"{_KEY}merges" not in self._metadata:
            return None
        merges = []
        for merge in self._list("merges", str):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise damaged(self._path, f"{_KEY}merges has {merge[:60]!r}, which is not two tokens")
            merges.append((left, right))
        return merges

    def _found_merges(self, scores: list[float]) -> list[tuple[str, str]]:
        vocab = {token: token_id for token_id, token in enumerate(self._tokens)}
        try:
            return find_merges(vocab, zip(self._tokens, scores, strict=True))
        except ValueError:
            raise damaged(self._path, f"{_KEY}tokens are too long together") from None

    def _added(self) -> list[Part]:
        added = []
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True)):
            is_special = kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)
            # A run of spaces is an ordinary token.
            if token and (is_special or (kind == PieceKind.USER_DEFINED and token.strip(SPACE))):
                added.append(added_token(token_id, token, is_special))
        return added

    def _around(self, adds_bos: bool) -> Part | None:
        """The part that adds tokens around a text; None if it adds none."""
        # Gemma 4 needs the beginning, and some of its files deny it.
        begins = self._value("add_bos_token", bool, adds_bos) or self._model == _GEMMA4
        ends = self._value("add_eos_token", bool, False)
        return surround(self._token("bos") if begins else None, self._token("eos") if ends else None)

    def _templates(self) -> Part:
        """The chat templates, as in tokenizer_config.json."""
        key = "tokenizer.chat_template"
        main, names = self._metadata.get(key), self._metadata.get("tokenizer.chat_templates", [])
        if not isinstance(names, list) or not names:
            return {} if main is None else {"chat_template": main}
        named = {str(name): self._metadata.get(f"{key}.{name}") for name in names} | {"default": main}
        listed = [{"name": name, "template": text} for name, text in named.items() if text is not None]
        return {"chat_template": listed}

    def _token(self, name: str) -> NamedToken | None:
        token_id = self._id(name)
        return None if token_id is None else (self._tokens[token_id], token_id)

    def _named(self, name: str) -> str | None:
        token = self._token(name)
        return None if token is None else token[0]

    def _id(self, name: str) -> int | None:
        key = f"{name}_token_id"
        token_id: int | None = self._value(key, int, None)
        if token_id is not None and not 0 <= token_id < len(self._tokens):
            raise damaged(self._path, f"{_KEY}{key} is {token_id:,}, and there are {len(self._tokens):,} tokens")
        return token_id

    def _value(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(f"{_KEY}{name}", default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise damaged(self._path, f"{_KEY}{name} is {str(value)[:60]}, and must be {kind.__name__}")
        return value

    def _optional_list(self, name: str, kind: type) -> list[Any] | None:
        return self._list(name, kind) if f"{_KEY}{name}" in self._metadata else None

    def _list(self, name: str, kind: type) -> list[Any]:
        """Returns an array. Besides the tokens and the merges, it has an item for each token."""
        values = self._metadata.get(f"{_KEY}{name}")
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise damaged(self._path, f"{_KEY}{name} is missing or not an array of {kind.__name__}")
        if name not in ("tokens", "merges") and len(values) != len(self._tokens):
            counts = f"{len(values):,} items, and there are {len(self._tokens):,} tokens"
            raise damaged(self._path, f"{_KEY}{name} has {counts}")
        return values
