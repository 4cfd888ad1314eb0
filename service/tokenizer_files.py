"""Reads a model's tokenizer from its directory. Knows nothing of what is done with it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

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


def read_tokenizer(directory: Path, chat_template: Path | None = None) -> TokenizerFiles:
    """Reads tokenizer.json and what stands beside it; ``chat_template`` takes the place of the model's own template.

    Raises TokenizerError.
    """
    path = directory / "tokenizer.json"
    data = _read(path, "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers makes it")
    library, decoder = _load(path, data)
    config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
    named = named_tokens(config)
    return TokenizerFiles(
        path=path,
        library=library,
        decoder=decoder,
        special_tokens=frozenset(named.values()) | frozenset(unnamed_tokens(config)),
        eos_token_ids=frozenset(_eos_token_ids(directory, library.token_to_id(named.get("eos_token", "")))),
        template=_read_template(directory, chat_template, config, named),
    )


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
