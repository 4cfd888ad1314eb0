"""Reads a model's tokens from the files next to tokenizer.json, by transformers' own rules
(``PreTrainedTokenizerBase._from_pretrained`` and ``TokenizersBackend.__init__``)."""

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken

from penstock.models.checkpoint.files.model_files import MAX_TOKENIZER_CONFIG_BYTES, read_model_file
from penstock.models.errors import ModelError

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"

_STANDARD = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The order in which tokens that tokenizer.json lacks get their ids."""
_DECODER, _EXTRA, _ADDITIONAL = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_ID = re.compile("[0-9]{1,10}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(Exception):
    """A model's tokenizer cannot be used. The text is one line that names the file and the remedy."""


@dataclass(frozen=True)
class TokenizerConfig:
    """The content of tokenizer_config.json, special_tokens_map.json and added_tokens.json."""

    fields: Mapping[str, Any]
    """The fields of tokenizer_config.json."""
    named: Mapping[str, str]
    """Tokens with a name, such as eos_token or image_token: they are variables of chat templates."""
    listed: frozenset[str]
    """Special tokens without a name."""
    ignored: Mapping[str, str]
    """Special tokens that transformers ignores, each with the file or field that names it."""
    decoder: Mapping[int, AddedToken]
    """Tokens by the ids that the files claim for them, ascending. They are added even if tokenizer.json has them, and
    then with these flags."""
    is_legacy: bool
    """Whether ``decoder`` comes from added_tokens.json; tokenizer.json takes precedence over that file."""
    extra: tuple[AddedToken, ...]
    """Named and listed tokens: they are added after those of ``decoder`` if tokenizer.json lacks them."""

    def additions(self, own: Mapping[int, str]) -> list[AddedToken]:
        """Returns the tokens to add, in order, to a tokenizer.json whose ``added_tokens`` are ``own``."""
        added = [token for token_id, token in self.decoder.items() if not (self.is_legacy and token_id in own)]
        known = {token.content for token in added} | set(own.values())
        for token in self.extra:
            if token.content not in known and token not in added:
                added.append(token)
        return [token for token in added if token.content]


def read_tokenizer_config(directory: Path, defaults: Mapping[str, str] = MappingProxyType({})) -> TokenizerConfig:
    """Reads the files. ``defaults`` are fields that tokenizer_config.json may leave out. Raises TokenizerError, which
    names the file and the field."""
    where = directory / CONFIG
    fields = {**defaults, **read_json(where)}
    values = dict(fields)
    if _ADDITIONAL in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_ADDITIONAL)
    own_names = {
        name: values.pop(name)
        for name, value in fields.items()
        if name.endswith("_token") and name not in _STANDARD and isinstance(value, str)
    }
    _move_named(values, own_names)
    is_legacy = _DECODER not in fields
    if is_legacy:
        # Written by older versions of transformers; it takes precedence over tokenizer_config.json.
        _merge(values, directory / SPECIAL_TOKENS_MAP)
        _move_named(values, own_names)
    known = [values.get(name) for name in _STANDARD]
    if isinstance(values.get(_EXTRA), list):
        known += values[_EXTRA]
    named = _named(values, own_names, where)
    if _EXTRA not in values and _ADDITIONAL in values:
        values[_EXTRA] = values.pop(_ADDITIONAL)
    extra = _listed(values.get(_EXTRA), _EXTRA, where)
    ignored = {token.content: _ADDITIONAL for token in _listed(values.get(_ADDITIONAL), _ADDITIONAL, where)}
    if is_legacy:
        special = {str(token) for token in known if isinstance(token, str | AddedToken)}
        decoder = _legacy_decoder(directory / ADDED_TOKENS, special)
    else:
        decoder = _decoder(fields[_DECODER], where)
        ignored |= _ignored(directory)
    named_contents = {token.content for token in named.values()}
    for token in decoder.values():
        token.special = token.special or token.content in named_contents
    return TokenizerConfig(
        fields=fields,
        named={name: token.content for name, token in named.items()},
        listed=frozenset(token.content for token in extra),
        ignored=ignored,
        decoder=dict(sorted(decoder.items())),
        is_legacy=is_legacy,
        extra=(*named.values(), *extra),
    )


def _move_named(values: dict[str, Any], own_names: dict[str, Any]) -> None:
    """Moves the names in ``extra_special_tokens`` to ``own_names`` if it is an object."""
    if isinstance(values.get(_EXTRA), dict):
        own_names.update(values.pop(_EXTRA))


def _merge(values: dict[str, Any], file: Path) -> None:
    """Adds the values of special_tokens_map.json."""
    for name, value in read_json(file).items():
        known = values.get(name) or []
        if name == _EXTRA and isinstance(value, list) and isinstance(known, list):
            values[name] = known + [token for token in value if token not in known]
        elif isinstance(value, dict) and name != _EXTRA:
            values[name] = _token({**value, "special": True}, name, file)
        elif name in _STANDARD and value is not None:
            values[name] = str(_token(value, name, file))
        else:
            values[name] = value


def _ignored(directory: Path) -> dict[str, str]:
    """Returns the tokens of the older files, which ``added_tokens_decoder`` replaces."""
    found = dict.fromkeys(read_json(directory / ADDED_TOKENS), ADDED_TOKENS)
    for name, value in read_json(directory / SPECIAL_TOKENS_MAP).items():
        content = value.get("content") if isinstance(value, dict) else value
        if name in _STANDARD and isinstance(content, str):
            found[content] = SPECIAL_TOKENS_MAP
    return found


def _named(values: Mapping[str, Any], own_names: Mapping[str, Any], where: Path) -> dict[str, AddedToken]:
    """Returns the named tokens, in transformers' order."""
    found = {name: values.get(name) for name in _STANDARD}
    for name, value in values.items():
        is_token = isinstance(value, str | AddedToken) or (isinstance(value, dict) and "__type" in value)
        if name.endswith("_token") and name not in found and is_token:
            found[name] = value
    found.update(own_names)
    named = {name: _token(value, name, where) for name, value in found.items() if value is not None}
    for token in named.values():
        token.special = True
    return {name: token for name, token in named.items() if token.content}


def _listed(values: object, name: str, where: Path) -> list[AddedToken]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise _wrong(where, name, "must be a list of tokens, or an object with their names")
    return [_token(value, name, where) for value in values]


def _decoder(values: object, where: Path) -> dict[int, AddedToken]:
    """Parses ``added_tokens_decoder``."""
    if not isinstance(values, dict) or not all(_ID.fullmatch(name) for name in values):
        raise _wrong(where, _DECODER, "must be an object of ids and tokens")
    return {int(name): _token(value, f"{_DECODER}.{name}", where) for name, value in values.items()}


def _legacy_decoder(file: Path, special: Container[str]) -> dict[int, AddedToken]:
    """Reads added_tokens.json, which has no flags."""
    found = {}
    for content, token_id in read_json(file).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerError(f"{file}: the id of {content!r} is {str(token_id)[:60]}: fetch it again")
        is_special = content in special
        found[token_id] = AddedToken(content, normalized=not is_special, special=is_special)
    return found


def _token(value: object, name: str, where: Path) -> AddedToken:
    """Parses a token: its text, or an object with flags."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise _wrong(where, name, "must be a token: its text, or an object with content")
    flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise _wrong(where, name, f"must have flags that are true or false ({', '.join(_FLAGS)})")
    return AddedToken(value["content"], **flags)


def _wrong(where: Path, name: str, rule: str) -> TokenizerError:
    return TokenizerError(f"{where}: {name} {rule}: fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty one if there is no file. Raises TokenizerError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bytes(path, "fetch it again", MAX_TOKENIZER_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: is not valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: is not a JSON object: fetch it again")
    return value


def read_bytes(path: Path, remedy: str, max_bytes: int, within: Path | None = None) -> bytes:
    """Returns a file's content, of at most ``max_bytes``; a link must not lead out of ``within``. Raises
    TokenizerError, with ``remedy`` if the file is missing."""
    try:
        return read_model_file(path, max_bytes, within)
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    except FileNotFoundError as error:
        raise TokenizerError(f"{path}: is missing: {remedy}") from error
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}): check the path and its rights") from error
