"""Reads a model's tokenizer from its directory. Knows nothing of what is done with it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import tokenizers

from penstock.models.tokenizer_json import Vocabulary
from penstock.service.chat_template import ChatTemplate, TemplateSyntaxError
from penstock.service.specials import named_tokens, unnamed_tokens


class TokenizerError(Exception):
    """A model's tokenizer cannot be used. The text is one line that names the file and the remedy."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What a directory says of its tokenizer."""

    path: Path
    """Of tokenizer.json."""
    library: tokenizers.Tokenizer
    decoder: Any
    """Its description in tokenizer.json, parsed; None if there is none."""
    special_tokens: frozenset[str]
    """Those that the configuration names, whether or not tokenizer.json marks them as special."""
    eos_token_ids: frozenset[int]
    """As the files have them: they may lie outside the vocabulary."""
    template: ChatTemplate | None


@dataclass(frozen=True)
class TokenizerFacts:
    """What a worker is told of the tokenizer."""

    vocab_size: int
    """Token ids lie below it; added tokens count, aliases of our own do not."""
    special_tokens: tuple[str, ...]
    """Those that the configuration names, and tokenizer.json has, in order."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output. A configuration may name ids that the tokenizer lacks: they are never chosen."""

    @classmethod
    def of(cls, ids: Mapping[str, int], special_tokens: Iterable[str], eos_token_ids: Iterable[int]) -> Self:
        """From the ids of all tokens, and what the files say."""
        vocab_size = max(ids.values(), default=-1) + 1
        return cls(
            vocab_size,
            tuple(sorted({token for token in special_tokens if token in ids})),
            tuple(sorted({token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size})),
        )


def foresee_facts(directory: Path) -> TokenizerFacts | None:
    """What a tokenizer's facts will be, in a tenth of the time that reading it takes. None where only the library can
    tell, which gives some tokens other ids than the file does. Raises TokenizerError."""
    try:
        described = msgspec.json.decode(_read_tokenizer_json(directory), type=_Numbered)
    except (ValueError, RecursionError):  # the library says what is wrong
        return None
    ids = described.ids()
    if ids is None:
        return None
    config = _read_config(directory)
    named = named_tokens(config)
    special_tokens = frozenset(named.values()) | frozenset(unnamed_tokens(config))
    return TokenizerFacts.of(ids, special_tokens, _eos_token_ids(directory, ids.get(named.get("eos_token", ""))))


def read_tokenizer(directory: Path, chat_template: Path | None = None) -> TokenizerFiles:
    """Reads tokenizer.json and what stands beside it; ``chat_template`` takes the place of the model's own template.

    Raises TokenizerError.
    """
    path = directory / "tokenizer.json"
    library, decoder = _load(path, _read_tokenizer_json(directory))
    config = _read_config(directory)
    named = named_tokens(config)
    return TokenizerFiles(
        path=path,
        library=library,
        decoder=decoder,
        special_tokens=frozenset(named.values()) | frozenset(unnamed_tokens(config)),
        eos_token_ids=frozenset(_eos_token_ids(directory, library.token_to_id(named.get("eos_token", "")))),
        template=_read_template(directory, chat_template, config, named),
    )


def _read_tokenizer_json(directory: Path) -> bytes:
    remedy = "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers makes it"
    return _read(directory / "tokenizer.json", remedy)


def _read_config(directory: Path) -> dict[str, Any]:
    return _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Numbered(msgspec.Struct):
    """What tokenizer.json says of ids."""

    model: Vocabulary
    added_tokens: list[_AddedToken] = []

    def ids(self) -> dict[str, int] | None:
        """Of all tokens; None where the file's may not be the library's, which numbers added tokens by itself: each as
        the model does, or else from its last one on."""
        ids = self.model.ids()
        if len(ids) < len(self.model.vocab) or set(ids.values()) != set(range(len(ids))):
            return None
        for token in self.added_tokens:
            if ids.setdefault(token.content, len(ids)) != token.id:
                return None
        return ids


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None


class _TokenizerJson(msgspec.Struct):
    model: _Model
    decoder: Any = None


def _load(path: Path, data: bytes) -> tuple[tokenizers.Tokenizer, Any]:
    """The library's tokenizer, and the description of its decoder."""
    try:
        described = msgspec.json.decode(data, type=_TokenizerJson)
        if described.model.continuing_subword_prefix:
            # Its decoder would not be supported, and with a prefix that does not fit the library ends the process.
            raise ValueError("model.continuing_subword_prefix is not supported")
        return tokenizers.Tokenizer.from_buffer(data), described.decoder
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The library raises bare Exceptions for what it does not like in a file, and its panics are not even those.
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{path}: is no valid tokenizer ({reason}): fetch it again") from error


def _read_template(
    directory: Path, chosen: Path | None, config: dict[str, Any], named: dict[str, str]
) -> ChatTemplate | None:
    beside = directory / "chat_template.jinja"
    if chosen is not None or beside.is_file():
        where = chosen or beside
        source: object = _read(where, "give the path of a Jinja template").decode(errors="replace")
    else:
        where = directory / "tokenizer_config.json"
        source = config.get("chat_template")
    if isinstance(source, list):
        # Several templates for several purposes; the one for a conversation is called so.
        named_ones = (entry for entry in source if isinstance(entry, dict))
        source = next((entry.get("template") for entry in named_ones if entry.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{where}: chat_template is no text: correct it, or give another with --chat-template")
    try:
        return ChatTemplate(source, named)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"{where}: the chat template is no valid Jinja, {error}: correct it, or give another with --chat-template"
        ) from error


def _eos_token_ids(directory: Path, named: int | None) -> Iterator[int]:
    if named is not None:
        yield named
    for name in ("config.json", "generation_config.json"):
        found = _read_json(directory / name).get("eos_token_id")
        for token_id in found if isinstance(found, list) else [found]:
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                yield token_id


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TokenizerError(f"{path}: is missing: {remedy}") from error
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}): check the path and its rights") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path, "fetch it again"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: is no valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: is no JSON object: fetch it again")
    return value
