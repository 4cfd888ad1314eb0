"""Converts a GGUF file's metadata to the tokenizer files that a model's directory would have. Imports no tokenizer
library; the reader of the files checks them.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from penstock.models.checkpoint.gguf.config import ARCHITECTURE
from penstock.models.checkpoint.gguf.header import damaged, read_header
from penstock.models.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, Part
from penstock.models.errors import ModelError

MAX_AREA = 1 << 26
"""Limit on the sum of the squares of the tokens' lengths where merges are found by cutting tokens in two."""

_KEY = "tokenizer.ggml."
_SPACE = "▁"
_END_OF_TURN = {
    "</s>", "<EOT>", "<eos>", "<end_of_turn>", "<end_of_utterance>", "<|call|>", "<|end_of_text|>", "<|endoftext|>",
    "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|return|>",
}  # fmt: skip
"""Control tokens that end an output although a file may name only one of them, as in llama.cpp."""


class TokenKind(IntEnum):
    """The kinds of tokens in ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


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
        self._tokens: list[str] = self._list("tokens", str)
        if len(set(self._tokens)) < len(self._tokens):
            raise damaged(path, f"{_KEY}tokens has a token twice")
        kinds = self._optional_list("token_type", int)
        self._kinds: list[int] = [TokenKind.NORMAL] * len(self._tokens) if kinds is None else kinds

    def files(self) -> dict[str, dict[str, Any]]:
        model = self._value("model", str, None)
        makers: Mapping[str | None, Callable[[], Part]] = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if model not in makers:
            raise ModelError(
                f"{self._path}: {_KEY}model is {str(model)[:60]!r}, and must be gpt2 or llama: use the model's "
                "safetensors version"
            )
        described = makers[model]()
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        named = {name: token for name, key in names.items() if (token := self._named(key)) is not None}
        ends = {self._id(key) for key in ("eos", "eot", "eom")} - {None}
        ends |= {
            token_id
            for token_id, token in enumerate(self._tokens)
            if token in _END_OF_TURN and self._kinds[token_id] == TokenKind.CONTROL
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
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        merges = self._merges()
        if merges is None:
            raise damaged(self._path, f"{_KEY}merges is missing")
        model = self._bpe(merges, ignore_merges=words.ignore_merges)
        return {
            "normalizer": words.normalizer,
            "pre_tokenizer": words.part,
            "post_processor": self._around(words.adds_bos),
            "decoder": decoder,
            "model": model,
        }

    def _sentencepiece(self) -> Part:
        is_gemma = str(self._metadata.get(ARCHITECTURE)).startswith("gemma")
        if is_gemma:
            # Runs of spaces are in the file as such.
            self._tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in self._tokens]
        merges = self._merges()
        if merges is None:
            # Gemma's merges are in the order of its tokens, whatever their scores are.
            scores = [-float(index) for index in range(len(self._tokens))]
            merges = self._found_merges(scores if is_gemma else self._list("scores", float))
        has_prefix = self._value("add_space_prefix", bool, True)
        replace: Part = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        decoders: list[Part] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        prefix: Part = {"type": "Prepend", "prepend": _SPACE}
        return {
            "normalizer": {"type": "Sequence", "normalizers": [prefix, replace]} if has_prefix else replace,
            "pre_tokenizer": None,
            "post_processor": self._around(True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                merges,
                unk_token=self._named("unknown"),
                fuse_unk=True,
                byte_fallback=TokenKind.BYTE in self._kinds,
            ),
        }

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> Part:
        defaults: Part = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        vocab = {token: token_id for token_id, token in enumerate(self._tokens)}
        return {"type": "BPE", "dropout": None, **defaults, **options, "vocab": vocab, "merges": merges}

    def _merges(self) -> list[tuple[str, str]] | None:
        """The merges in the file; None if it has none."""
        if f"{_KEY}merges" not in self._metadata:
            return None
        merges = []
        for merge in self._list("merges", str, len(self._metadata[f"{_KEY}merges"])):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise damaged(self._path, f"{_KEY}merges has {merge[:60]!r}, which is not two tokens")
            merges.append((left, right))
        return merges

    def _found_merges(self, scores: list[float]) -> list[tuple[str, str]]:
        """Finds the merges of a SentencePiece model: all pairs of tokens that make a token, those of tokens with high
        scores first (transformers' ``generate_merges``)."""
        if sum(len(token) ** 2 for token in self._tokens) > MAX_AREA:
            raise damaged(self._path, f"{_KEY}tokens are too long together")
        vocab = {token: token_id for token_id, token in enumerate(self._tokens)}
        merges = []
        for token, score in zip(self._tokens, scores, strict=True):
            found = [
                (left, right)
                for at in range(1, len(token))
                if (left := token[:at]) in vocab and (right := token[at:]) in vocab
            ]
            found.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            merges += [(score, len(left), len(right), left, right) for left, right in found]
        merges.sort(key=itemgetter(0, 1, 2), reverse=True)
        return [merge[3:] for merge in merges]

    def _added(self) -> list[Part]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = []
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._kinds, strict=True)):
            is_special = kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)
            # A run of spaces is an ordinary token.
            if token and (is_special or (kind == TokenKind.USER_DEFINED and token.strip(_SPACE))):
                added.append({"id": token_id, "content": token, **flags, "special": is_special})
        return added

    def _around(self, adds_bos: bool) -> Part | None:
        """The part that adds tokens around a text; None if it adds none."""
        begin = self._id("bos") if self._value("add_bos_token", bool, adds_bos) else None
        end = self._id("eos") if self._value("add_eos_token", bool, False) else None
        if begin is None and end is None:
            return None

        def template(name: str, type_id: int) -> list[Part]:
            before, after = ([] if each is None else [special(each, type_id)] for each in (begin, end))
            return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]

        def special(token_id: int, type_id: int) -> Part:
            return {"SpecialToken": {"id": self._tokens[token_id], "type_id": type_id}}

        tokens = {self._tokens[each]: each for each in (begin, end) if each is not None}
        return {
            "type": "TemplateProcessing",
            "single": template("A", 0),
            "pair": [*template("A", 0), *template("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [each], "tokens": [token]} for token, each in tokens.items()
            },
        }

    def _templates(self) -> Part:
        """The chat templates, as in tokenizer_config.json."""
        key = "tokenizer.chat_template"
        main, names = self._metadata.get(key), self._metadata.get("tokenizer.chat_templates", [])
        if not isinstance(names, list) or not names:
            return {} if main is None else {"chat_template": main}
        named = {str(name): self._metadata.get(f"{key}.{name}") for name in names} | {"default": main}
        listed = [{"name": name, "template": text} for name, text in named.items() if text is not None]
        return {"chat_template": listed}

    def _named(self, name: str) -> str | None:
        token_id = self._id(name)
        return None if token_id is None else self._tokens[token_id]

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

    def _list(self, name: str, kind: type, length: int | None = None) -> list[Any]:
        """Returns an array with ``length`` items, by default as many as there are tokens."""
        values = self._metadata.get(f"{_KEY}{name}")
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise damaged(self._path, f"{_KEY}{name} is missing or not an array of {kind.__name__}")
        wanted = length if length is not None else len(self._tokens) if name != "tokens" else len(values)
        if len(values) != wanted:
            raise damaged(self._path, f"{_KEY}{name} has {len(values):,} items, and there are {wanted:,} tokens")
        return values
