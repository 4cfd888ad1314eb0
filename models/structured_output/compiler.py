"""Converts clients' constraints to llguidance grammars, and compiles these to matchers. The same code checks a grammar
in a separate process before its request is accepted, and compiles it in the worker."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from penstock.models.checkpoint.files.model_files import MAX_TOKENIZER_BYTES, read_model_file
from penstock.models.checkpoint.files.tokenizer_json import Vocabulary
from penstock.models.structured_output.exact_numbers import (
    ExactWriter,
    NumberError,
    Real,
    has_inexact,
    quoted,
    read_integer,
    without_annotations,
)
from penstock.models.structured_output.json_schema import ObjectCloser, without_covered_patterns
from penstock.models.structured_output.structural_tag import PartWriters, tag_grammar
from penstock.models.structured_output.tag_formats import WORDS, TagError
from penstock.models.structured_output.tag_tokens import TagTokens

LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
"""Limits the work for a grammar, at its start and in each step, and a matcher's memory: a state takes 1 to 2 kB, and
each row has its own states. The other limits are the library's defaults."""
WHITESPACE = r"(?:\x20|\r?\n[\x20\x09]{0,40})"
"""The whitespace allowed between JSON tokens, unless a schema specifies another: that of usual JSON formatting. If any
whitespace is allowed, weak models write blanks without end."""
MAX_REASON = 160


class GrammarError(Exception):
    """A grammar that cannot be used. The message is one line that describes the error."""


def read_tokenizer(
    directory: str,
    special_tokens: Sequence[str],
    num_ids: int,
    eos_token_ids: Sequence[int],
    added_tokens: Sequence[tuple[int, str]] = (),
) -> LLTokenizer:
    """Reads the tokenizer that matchers use from a model's directory. Masks have ``num_ids`` bits. ``special_tokens``
    are special even if tokenizer.json has them only in its vocabulary. ``added_tokens`` are the ids and contents of
    tokens that it lacks. Raises ValueError if the library cannot derive the bytes of the tokenizer's tokens."""
    content = read_model_file(Path(directory) / "tokenizer.json", MAX_TOKENIZER_BYTES)
    described = _with_tokens(content, special_tokens, added_tokens)
    return LLTokenizer(described, n_vocab=num_ids, eos_token=list(eos_token_ids))


def _with_tokens(described: bytes, special_tokens: Sequence[str], added_tokens: Sequence[tuple[int, str]]) -> str:
    """Returns the tokenizer.json with the given tokens added or made special, and without truncation and padding. The
    vocabulary is copied unparsed if possible, because parsing it would take as long as everything else."""
    parts = msgspec.json.decode(described, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(parts.get("added_tokens", b"null"), type=list[dict[str, Any]] | None) or []
    by_content = {token["content"]: token for token in added}
    for token_id, content in added_tokens:
        by_content[content] = {"id": token_id, "content": content, **_FLAGS, "special": False}
    vocabulary: Mapping[str, int] = {}
    if not by_content.keys() >= set(special_tokens):
        vocabulary = msgspec.json.decode(parts["model"], type=Vocabulary).ids()
    for content in special_tokens:
        known = by_content[content]["id"] if content in by_content else vocabulary.get(content)
        if known is not None:
            by_content[content] = {"id": known, "content": content, **_FLAGS, "special": True}
    tokens = sorted(by_content.values(), key=lambda token: token["id"])
    nothing = msgspec.Raw(b"null")
    changed = {"added_tokens": msgspec.Raw(msgspec.json.encode(tokens)), "truncation": nothing, "padding": nothing}
    return msgspec.json.encode({**parts, **changed}).decode()


_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""The flags of tokens that a configuration names. Matchers do not depend on these flags."""


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns a matcher at the beginning of an output. It has computed its first mask, so its copies share the results
    that take long to compute. Raises GrammarError, also if the library fails at the first token."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    begun = _after_one_token(matcher, tokenizer) if not matcher.is_error() else None
    for one in (matcher, begun):
        if one is not None and one.is_error():
            raise GrammarError(reason_of(one))
    return matcher


def _after_one_token(matcher: LLMatcher, tokenizer: LLTokenizer) -> LLMatcher | None:
    """Returns the matcher after one allowed first token that is not EOS; None if there is no such token."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    for token_id in tokenizer.eos_tokens:
        allowed &= ~(1 << token_id)
    if not allowed:
        return None
    begun = matcher.deep_copy()
    begun.consume_token(allowed.bit_length() - 1)
    return begun


def reason_of(matcher: LLMatcher) -> str:
    """Returns the reason why a matcher cannot continue."""
    error = matcher.get_error()
    return "no text can match it" if error.startswith("NoExtension") else one_line(error)


def one_line(message: str) -> str:
    """Returns the library's error message without the lines that show the position."""
    lines = [line.strip() for line in message.splitlines()] or [""]
    line = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."


_NO_FORCING = re.compile(r'%llguidance\s*\{[^}]*"no_forcing"\s*:\s*true')


def forces_tokens(grammar: str) -> bool:
    """Whether a grammar in the library's form allows forced text only in the tokenizer's own tokens."""
    return _NO_FORCING.search(grammar) is None


_KEYWORDS = WORDS | frozenset(
    """
    additionalItems allOf anyOf const contains dependencies dependentRequired dependentSchemas else enum
    exclusiveMaximum exclusiveMinimum false format if items lenient maxContains maxItems maxLength
    maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern
    patternProperties prefixItems properties propertyNames required schema then true type unevaluatedItems
    unevaluatedProperties uniqueItems
    """.split()  # noqa: SIM905 - a list of words
)
"""Keywords of JSON Schema and structural tags. Errors keep them, because clients need them to find the error."""
_CUT = re.compile(r"…(\W\w{0,2}){0,3}(…(\W\w{0,2}){0,3})*…")


def discreet(message: str, text: str) -> str:
    """Removes the client's own words from a message, because no status may repeat a client's text."""
    theirs = {word for word in re.findall(r"\w+", text) if len(word) > 2} - _KEYWORDS
    return _CUT.sub("…", re.sub(r"\w+", lambda word: "…" if word[0] in theirs else word[0], message))


# Conversion from the client's form ------------------------------------------------------------------------------------

NO_IDS: Mapping[str, int] = MappingProxyType({})


def to_grammar(
    kind: str,
    text: str,
    marker_ids: Mapping[str, int] = NO_IDS,
    *,
    forces: bool = True,
    closes_objects: bool = True,
    added_ids: Mapping[str, int] = NO_IDS,
    eos_token_ids: Sequence[int] = (),
) -> str:
    """Converts a constraint to a grammar in the library's form. ``kind`` is a field of the API's ``Constraint``;
    ``choices`` are given as a JSON list. Without ``forces``, forced text may have any tokens, not only the tokenizer's
    own. With ``closes_objects``, an object that declares properties may have no others, unless the schema allows them.
    ``marker_ids`` are the ids of special tokens and of others that the library does not treat as text, and
    ``added_ids`` those of all added tokens. Raises GrammarError for some errors; the compiler reports the others."""
    try:
        if kind == "structural_tag_json":
            grammar = _structural_tag(text, closes_objects, TagTokens(marker_ids, added_ids, eos_token_ids))
        else:
            grammar = _CONVERTERS[kind](text, closes_objects)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    # The library tokenizes forced text, and turns text that spells a marker into its token.
    plain = grammar.replace("\\", "")
    is_safe = forces and not any(token in plain for token in marker_ids)
    return grammar if is_safe else f'%llguidance {{"no_forcing": true}}\n{grammar}'


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_SCHEMAS = json.JSONDecoder(parse_float=Real.read, parse_int=read_integer, parse_constant=_no_number)


_ESCAPES = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F])|.)", re.DOTALL)
"""Matches escapes in JSON, pairs of surrogates as one. The group is a surrogate without the other half."""


def _decoded(text: str) -> Any:
    try:
        value = _SCHEMAS.decode(text)
    except ValueError as error:
        raise GrammarError(f"is not JSON: {error}") from None
    _check_characters(text)
    return value


def _check_characters(text: str) -> None:
    if any(found[1] for found in _ESCAPES.finditer(text)):
        raise GrammarError("has half of a surrogate pair, not a character")


def _json_schema(text: str, closes_objects: bool) -> str:
    body, rules = _of_schema(_decoded(text), closes_objects)
    return "\n".join([f"start: {body}", *rules])


def _of_schema(schema: Any, closes_objects: bool, number: int = 0) -> tuple[str, list[str]]:
    """Returns an expression for the values of a schema, and the rules that the expression needs."""
    if not isinstance(schema, dict):
        return f"%json {json.dumps(schema)}", []
    schema = without_covered_patterns(without_annotations(schema))
    if closes_objects:
        schema = ObjectCloser(schema).closed_root()
    options = schema["x-guidance"] = _json_options(schema.get("x-guidance"))
    if not has_inexact(schema):
        return f"%json {json.dumps(schema, ensure_ascii=False)}", []
    pattern = options.get("whitespace_pattern")
    whitespace = pattern if isinstance(pattern, str) else r"[\x20\x0A\x0D\x09]*"
    try:
        return ExactWriter(schema, whitespace, number).rules()
    except NumberError as error:
        raise GrammarError(str(error)) from None


def _lark(text: str, closes_objects: bool) -> str:
    """Converts the JSON schemas in a Lark grammar as it converts a ``json_schema``."""
    parts: list[str] = []
    more: list[str] = []
    at = 0
    for found in _LARK.finditer(text):
        if not found[1] or found.start() < at:
            continue
        try:
            schema, end = _SCHEMAS.raw_decode(text, found.end())
        except ValueError:  # the compiler reports the error
            continue
        _check_characters(text[found.end() : end])
        body, rules = _of_schema(schema, closes_objects, len(parts))
        parts += [text[at : found.start()], body]
        more += rules
        at = end
    return "\n".join(["".join([*parts, text[at:]]), *more])


_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|(%json\s+)(?=[{\[tf])')
"""Matches strings, regular expressions and comments, which are skipped, and the beginning of a schema."""


def _json_options(given: object) -> dict[str, Any]:
    """Returns the schema's own ``x-guidance`` with our default whitespace. Never lenient: keywords that the library
    does not support are errors."""
    options: Mapping[str, Any] = given if isinstance(given, dict) else {}
    has_whitespace = "whitespace_pattern" in options or "whitespace_flexible" in options
    return {**({} if has_whitespace else {"whitespace_pattern": WHITESPACE}), **options, "lenient": False}


def _regex(text: str, _: bool) -> str:
    return f"start: {_regex_terminal(text)}"


def _regex_terminal(text: str) -> str:
    return f"/{regex_to_lark(text, '')}/" if text else '""'


def _gbnf(text: str, _: bool) -> str:
    try:
        return str(gbnf_to_lark(_UNICODE.sub(_as_itself, text)))
    except RecursionError:
        raise
    except Exception as error:  # the converter has no narrower one
        raise GrammarError(one_line(str(error))) from None


_UNICODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _as_itself(match: re.Match[str]) -> str:
    """Returns the letter for an escape, from which the converter would strip the zeros."""
    digits = match[1] or match[2]
    character = chr(int(digits, 16)) if digits and int(digits, 16) <= 0x10FFFF else ""
    return character if character.isalnum() else match[0]


def _structural_tag(text: str, closes_objects: bool, tokens: TagTokens) -> str:
    def schema(given: Any, number: int) -> tuple[str, list[str]]:
        try:  # the older form of structural tags may have schemas as text
            return _of_schema(_decoded(given) if isinstance(given, str) else given, closes_objects, number)
        except GrammarError as error:
            raise TagError("", str(error)) from None

    def grammar(given: str) -> str:
        try:
            return (_gbnf if "::=" in given else _lark)(given, closes_objects)
        except GrammarError as error:
            raise TagError("", str(error)) from None

    try:
        return tag_grammar(_decoded(text), tokens, PartWriters(schema, grammar, _regex_terminal))
    except TagError as error:
        raise GrammarError(str(error)) from None


def _choices(text: str, _: bool) -> str:
    return "start: " + " | ".join(map(_in_parts, json.loads(text)))


def _in_parts(text: str) -> str:
    """Returns a text as a sequence of Lark strings, since compiling a long one takes five times as much memory."""
    return " ".join(quoted(text[begin : begin + 256]) for begin in range(0, max(1, len(text)), 256))


_CONVERTERS: Mapping[str, Callable[[str, bool], str]] = {
    "json_schema": _json_schema,
    "any_json": lambda _, closes_objects: _json_schema('{"type": "object"}', closes_objects),
    "regex": _regex,
    "lark": _lark,
    "gbnf": _gbnf,
    "choices": _choices,
}
