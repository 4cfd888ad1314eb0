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

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""The template of conversations with tools, as transformers has it."""
_GIVE_TEMPLATE = "give the path of a Jinja template"


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
    templates: Mapping[str, ChatTemplate]
    """By name: ``DEFAULT_TEMPLATE``, ``TOOL_TEMPLATE``, and others that only ``--chat-template`` names."""


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
    """Reads tokenizer.json and what stands beside it; ``chat_template`` is a file that takes the place of the model's
    own template, or the name of one of those.

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
        templates=_read_templates(directory, chat_template, config, named),
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


@dataclass(frozen=True, slots=True)
class _Source:
    """The text of a chat template, or what stands in its place."""

    where: Path
    text: object


def _read_templates(
    directory: Path, chosen: Path | None, config: dict[str, Any], named: dict[str, str]
) -> dict[str, ChatTemplate]:
    if chosen is None:
        sources = _template_sources(directory, config)
    elif chosen.exists():
        sources = {DEFAULT_TEMPLATE: _Source(chosen, _read_text(chosen))}
    else:
        own = _template_sources(directory, config)
        if str(chosen) not in own:
            names = f", or one of the model's own by its name: {', '.join(sorted(own))}" if len(own) > 1 else ""
            raise TokenizerError(f"{chosen}: is missing: {_GIVE_TEMPLATE}{names}")
        sources = {DEFAULT_TEMPLATE: own[str(chosen)]}
    return {name: _compile(source, named) for name, source in sources.items()}


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, _Source]:
    """The model's own templates by name. Files take the place of what tokenizer_config.json has, as in transformers."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (beside := directory / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = beside
    if files:
        return {name: _Source(path, _read_text(path)) for name, path in files.items()}
    where = directory / "tokenizer_config.json"
    source = config.get("chat_template")
    if not isinstance(source, list):
        return {} if source is None else {DEFAULT_TEMPLATE: _Source(where, source)}
    return {
        entry["name"]: _Source(where, entry["template"])
        for entry in source
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry.get("template") is not None
    }


def _read_text(path: Path) -> str:
    return _read(path, _GIVE_TEMPLATE).decode(errors="replace")


def _compile(source: _Source, named: dict[str, str]) -> ChatTemplate:
    where = source.where
    if not isinstance(source.text, str):
        raise TokenizerError(f"{where}: chat_template is no text: correct it, or give another with --chat-template")
    try:
        return ChatTemplate(source.text, named)
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
