"""Reads a model's tokenizer and chat templates from its directory."""

from collections.abc import Iterator, Mapping, Set as AbstractSet, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from penstock.models.checkpoint.files.model_files import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES
from penstock.service.chat_templates.chat_template import ChatTemplate, TemplateError, compile_templates
from penstock.service.text.tokenizer_bounds import TokenizerJson, check_names, read_described
from penstock.service.text.tokenizer_config import (
    ADDED_TOKENS,
    CONFIG,
    TokenizerConfig,
    TokenizerError,
    read_bytes,
    read_json,
    read_tokenizer_config,
)

TOKENIZER = "tokenizer.json"
DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"
"""The template of conversations with tools, by transformers' name."""
_MAX_TEMPLATES = 64
_MAX_WARNINGS = 10
"""Limit on warnings of one kind: a file may have a million reasons."""
_GIVE_TEMPLATE = "give the path of a Jinja template"
_ANOTHER_TEMPLATE = "correct it, or give another with --chat-template"
MAKE_TOKENIZER = (
    f"make a {TOKENIZER} with AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers"
)


@dataclass(frozen=True)
class ConvertedTokenizer:
    """The tokenizer of a model's directory that has no tokenizer.json."""

    file: Path
    """The tokenizer.json that was made of it, the only file of its directory."""
    origin: Path
    """The model's own file. Errors name it."""
    named: Mapping[str, str]
    """Tokens with a name that tokenizer_config.json may leave out."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer files of a directory."""

    origin: Path
    """The file that describes the tokenizer. Errors name it."""
    library: tokenizers.Tokenizer
    """The library's tokenizer, with all tokens that the other files add."""
    decoder: Any
    """The parsed decoder in tokenizer.json; None if there is none."""
    vocabulary: Mapping[str, int]
    """The ids of all tokens."""
    facts: "TokenizerFacts"
    templates: Mapping[str, ChatTemplate]
    """Templates by name: ``DEFAULT_TEMPLATE``, ``TOOL_TEMPLATE``, and others that only ``--chat-template`` names."""


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts of a tokenizer that workers get."""

    num_ids: int
    """All ids of the tokenizer are below it, apart from penstock's aliases."""
    vocab_size: int
    """Ids in prompts and outputs are below it: the smaller of ``num_ids`` and the model's rows."""
    special_tokens: tuple[str, ...]
    """Tokens that the configuration calls special, sorted, whether or not tokenizer.json does."""
    eos_token_ids: tuple[int, ...]
    added_tokens: tuple[tuple[int, str], ...]
    """Tokens that tokenizer.json lacks and other files have."""
    warnings: tuple[str, ...]
    """Settings in the files that have no effect, for the log."""


def predict_facts(
    directory: Path, num_rows: int | None = None, converted: ConvertedTokenizer | None = None
) -> TokenizerFacts | None:
    """Computes a tokenizer's facts in a tenth of the time that reading it takes. None if the library may give some
    tokens other ids than the file. ``num_rows``: the model's rows. Raises TokenizerError."""
    origin, content = _read_tokenizer_json(directory, converted)
    try:
        described = read_described(origin, content)
    except ValueError:  # ``read_tokenizer`` reports it in detail
        return None
    ids = _own_ids(described)
    if ids is None:
        return None
    config = read_tokenizer_config(directory, {} if converted is None else converted.named)
    special = frozenset(token.content for token in described.added_tokens if token.special)
    own = _OwnTokens({token.id: token.content for token in described.added_tokens}, special, {*ids})
    additions = config.additions(own.added)
    check_names(directory / CONFIG, [token.content for token in additions])
    for token in additions:
        ids.setdefault(token.content, len(ids))
    return _facts(directory, config, own, ids, num_rows)


def read_tokenizer(
    directory: Path,
    chat_template: Path | None,
    num_rows: int | None,
    template_timeout_s: float,
    converted: ConvertedTokenizer | None = None,
) -> TokenizerFiles:
    """Reads tokenizer.json and the files next to it. The parameters and errors are those of ``Tokenizer``."""
    origin, content = _read_tokenizer_json(directory, converted)
    library, decoder = _load(origin, content)
    config = read_tokenizer_config(directory, {} if converted is None else converted.named)
    added = library.get_added_tokens_decoder()
    special = frozenset(token.content for token in added.values() if token.special)
    before = library.get_vocab()
    own = _OwnTokens({token_id: token.content for token_id, token in added.items()}, special, before.keys())
    additions = config.additions(own.added)
    check_names(directory / CONFIG, [token.content for token in additions])
    library.add_tokens(additions)
    numbered = ((token.content, library.token_to_id(token.content)) for token in additions)
    vocabulary = before | {content: token_id for content, token_id in numbered if token_id is not None}
    return TokenizerFiles(
        origin=origin,
        library=library,
        decoder=decoder,
        vocabulary=vocabulary,
        facts=_facts(directory, config, own, vocabulary, num_rows),
        templates=_read_templates(directory, chat_template, config, template_timeout_s),
    )


@dataclass(frozen=True)
class _OwnTokens:
    """The tokens of tokenizer.json itself."""

    added: Mapping[int, str]
    special: AbstractSet[str]
    """The added tokens that it calls special."""
    all: AbstractSet[str]
    """Its whole vocabulary."""


def _facts(
    directory: Path, config: TokenizerConfig, own: _OwnTokens, ids: Mapping[str, int], num_rows: int | None
) -> TokenizerFacts:
    """Computes the facts. ``ids`` are those of all tokens."""
    num_ids = max(ids.values(), default=-1) + 1
    vocab_size = num_ids if num_rows is None else min(num_ids, num_rows)
    added = {token.content: token.special for token in config.additions(own.added) if token.content in ids}
    special = {content for content, is_special in added.items() if is_special}
    # The library still treats the special tokens of tokenizer.json as special, whatever the other files contain.
    special |= {*config.named.values(), *config.listed, *(own.special & added.keys())}
    warnings = list(_warnings(directory, config, ids, own.special | special))
    eos_token_ids = set()
    ignored = []
    for file, token_id in _eos_token_ids(directory, config, ids):
        if isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < vocab_size:
            eos_token_ids.add(token_id)
        else:
            ignored.append(f"{file}: eos token {str(token_id)[:60]} is ignored: the model has {vocab_size:,} tokens")
    warnings += ignored[:_MAX_WARNINGS]
    if not eos_token_ids:
        warnings.append(
            f"{directory}: no token ends an output, which goes on to a stop string or max_tokens: name eos_token in "
            f"{CONFIG}, or eos_token_id in generation_config.json"
        )
    return TokenizerFacts(
        num_ids=num_ids,
        vocab_size=vocab_size,
        special_tokens=tuple(sorted(special & ids.keys())),
        eos_token_ids=tuple(sorted(eos_token_ids)),
        added_tokens=tuple(sorted((ids[content], content) for content in added.keys() - own.all)),
        warnings=tuple(warnings),
    )


def _warnings(
    directory: Path, config: TokenizerConfig, ids: Mapping[str, int], special: AbstractSet[str]
) -> Iterator[str]:
    """Yields warnings about settings that have no effect, as in transformers."""
    file = directory / (ADDED_TOKENS if config.is_legacy else CONFIG)
    claimed = {token.content: token_id for token_id, token in config.decoder.items()}
    if moved := [content for content, token_id in claimed.items() if ids.get(content) != token_id]:
        yield (
            f"{file}: token {moved[0]!r} does not get the id {claimed[moved[0]]}, as in transformers, where "
            f"tokenizer.json and the order decide{_others(moved)}"
        )
    named = config.ignored.items()
    if ignored := sorted(token for token, by in named if token not in (ids if by == ADDED_TOKENS else special)):
        yield (
            f"{directory / CONFIG}: {ignored[0]!r} of {config.ignored[ignored[0]]} is ignored, as in transformers, "
            f"which reads added_tokens_decoder and extra_special_tokens in its place{_others(ignored)}"
        )


def _others(found: Sized) -> str:
    return f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""


def _read_tokenizer_json(directory: Path, converted: ConvertedTokenizer | None) -> tuple[Path, bytes]:
    """Returns the file that errors name, and the content of tokenizer.json."""
    file = directory / TOKENIZER if converted is None else converted.file
    remedy = f"fetch it, or tekken.json, tokenizer.model or tiktoken.model, or {MAKE_TOKENIZER}"
    return file if converted is None else converted.origin, read_bytes(file, remedy, MAX_TOKENIZER_BYTES)


def _own_ids(described: TokenizerJson) -> dict[str, int] | None:
    """Returns the ids of all tokens of a tokenizer.json. None if they may differ from the library's, which numbers
    added tokens by itself: by the model's id, or else after the last one."""
    ids = dict(described.model.ids())
    if len(ids) < len(described.model.vocab) or set(ids.values()) != set(range(len(ids))):
        return None
    for token in described.added_tokens:
        if ids.setdefault(token.content, len(ids)) != token.id:
            return None
    return ids


def _load(path: Path, data: bytes) -> tuple[tokenizers.Tokenizer, Any]:
    """Returns the library's tokenizer, and the description of its decoder."""
    try:
        described = read_described(path, data)
        if described.model.continuing_subword_prefix:
            # Its decoder is not supported, and with a prefix that does not fit the library ends the process.
            raise ValueError("model.continuing_subword_prefix is not supported")
        return tokenizers.Tokenizer.from_buffer(data), described.decoder
    except (KeyboardInterrupt, SystemExit, TokenizerError):
        raise
    except BaseException as error:
        # The library raises bare Exceptions for invalid files, and its panics are BaseExceptions.
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{path}: is not a valid tokenizer ({reason}): fetch it again") from error


_Sources = dict[str, tuple[Path, object]]
"""Chat templates by name: the file of each, and its text, or an invalid value in its place."""


def _read_templates(
    directory: Path, chosen: Path | None, config: TokenizerConfig, timeout_s: float
) -> dict[str, ChatTemplate]:
    if chosen is None:
        sources = _template_sources(directory, config.fields)
    elif chosen.exists():
        sources = {DEFAULT_TEMPLATE: (chosen, _read_text(chosen))}
    else:
        own = _template_sources(directory, config.fields)
        if str(chosen) not in own:
            names = f", or one of the model's own by its name: {', '.join(sorted(own))}" if len(own) > 1 else ""
            raise TokenizerError(f"{chosen}: is missing: {_GIVE_TEMPLATE}{names}")
        sources = {DEFAULT_TEMPLATE: own[str(chosen)]}
    return _compile(sources, config.named, timeout_s)


def _template_sources(directory: Path, fields: Mapping[str, Any]) -> _Sources:
    """Returns the model's own templates by name. Files replace those of tokenizer_config.json, as in transformers."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (beside := directory / "chat_template.jinja").exists():
        files[DEFAULT_TEMPLATE] = beside
    if len(files) > _MAX_TEMPLATES:
        raise TokenizerError(f"{directory}: has {len(files)} chat templates, and may have {_MAX_TEMPLATES}: remove one")
    if files:
        return {name: (path, _read_text(path, directory)) for name, path in files.items()}
    where = directory / CONFIG
    source = fields.get("chat_template")
    if not isinstance(source, list):
        return {} if source is None else {DEFAULT_TEMPLATE: (where, source)}
    return {
        entry["name"]: (where, entry["template"])
        for entry in source
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry.get("template") is not None
    }


def _read_text(path: Path, within: Path | None = None) -> str:
    return read_bytes(path, _GIVE_TEMPLATE, MAX_TEMPLATE_BYTES, within).decode(errors="replace")


def _compile(sources: _Sources, named: Mapping[str, str], timeout_s: float) -> dict[str, ChatTemplate]:
    texts = {}
    for name, (where, text) in sources.items():
        if not isinstance(text, str):
            raise TokenizerError(f"{where}: chat_template is not text: {_ANOTHER_TEMPLATE}")
        texts[name] = text
    try:
        return compile_templates(texts, named, timeout_s)
    except TemplateError as error:
        where, _ = sources[error.name]
        raise TokenizerError(f"{where}: the chat template {error}: {_ANOTHER_TEMPLATE}") from error


def _eos_token_ids(directory: Path, config: TokenizerConfig, ids: Mapping[str, int]) -> Iterator[tuple[Path, object]]:
    """Yields the tokens that end an output, each with the file that names it. As in transformers, config.json is
    ignored if generation_config.json names any."""
    if "eos_token" in config.named:
        yield directory / CONFIG, ids.get(config.named["eos_token"])
    for name in ("generation_config.json", "config.json"):
        found = read_json(directory / name).get("eos_token_id")
        if found is not None and found != []:
            for token_id in found if isinstance(found, list) else [found]:
                yield directory / name, token_id
            return
