"""Reads structural tags: checks the fields of each format, and fills in defaults. The fields are those of xgrammar."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

MAX_LEVELS = 64
"""The maximum number of formats inside one another."""
_MOST = 2**31 - 1


class TagError(Exception):
    """A structural tag is invalid, or cannot be enforced. The message begins with the place."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}" if place else problem)


class TagFormat(NamedTuple):
    """A format with all its fields."""

    type: str
    fields: Mapping[str, Any]
    """The values of its fields. Nested formats are Formats, and the end of a tag is a list."""
    place: str
    """The path of its object, for errors."""

    @property
    def is_open(self) -> bool:
        """Whether it may end in arbitrary text."""
        fields = self.fields
        match self.type:
            case "sequence":
                return bool(fields["elements"][-1].is_open)
            case "or":
                return any(each.is_open for each in fields["elements"])
            case "optional":
                return bool(fields["content"].is_open)
            case "triggered_tags" | "token_triggered_tags":
                return not (fields["at_least_one"] and fields["stop_after_first"])
        return self.type in ("any_text", "any_tokens", "dispatch", "token_dispatch")

    def repeated(self, content: str) -> str:
        """Returns the expression of an optional or repeated format from that of its content."""
        if self.type != "repeat":
            return content + {"optional": "?", "star": "*", "plus": "+"}[self.type]
        most = self.fields["max"]
        return up_to(content, None if most < 0 else most, self.fields["min"])


def up_to(content: str, most: int | None, least: int = 0) -> str:
    """Returns the expression of something that occurs this many times. Lark has no repetition of at most 0."""
    return '""' if most == 0 else f"{content}{{{least},{'' if most is None else most}}}"


def read_tag(value: Any) -> TagFormat:
    """Returns the format of a structural tag, in either form. Raises TagError."""
    if not isinstance(value, dict):
        raise TagError("", "it must be an object")
    if value.get("type", "structural_tag") != "structural_tag":
        raise TagError("type", "must be structural_tag")
    if "format" in value:
        _check_names(value, {"type", "format"}, "")
        return _format(value["format"], "format")
    if "structures" not in value:
        raise TagError("format", "is required, or structures and triggers")
    _check_names(value, {"type", "structures", "triggers"}, "")
    structures = _list(value["structures"], "structures")
    tags = [_older_tag(each, f"structures[{index}]") for index, each in enumerate(structures)]
    fields = {
        "triggers": _strings(value.get("triggers"), "triggers"),
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": False,
        "excludes": [],
    }
    return TagFormat("triggered_tags", fields, "")


def _older_tag(value: Any, place: str) -> TagFormat:
    """Reads an element of ``structures``. Its schema may be text."""
    if not isinstance(value, dict):
        raise TagError(place, "must be an object")
    _check_names(value, {"begin", "schema", "end"}, place)
    begin, end = (_string(value.get(key), f"{place}.{key}") for key in ("begin", "end"))
    schema = {"json_schema": _schema(value.get("schema"), f"{place}.schema"), "max_whitespace_cnt": None}
    content = TagFormat("json_schema", schema, f"{place}.schema")
    return TagFormat("tag", {"begin": begin, "content": content, "end": [end]}, place)


def _format(value: Any, place: str, level: int = 1, usual: str | None = None) -> TagFormat:
    """Reads a format. ``usual`` is the type if it names none."""
    if level > MAX_LEVELS:
        raise TagError("", f"its formats are nested more than {MAX_LEVELS} levels deep")
    if not isinstance(value, dict):
        raise TagError(place, "must be an object")
    kind = value.get("type", usual)
    if kind is None:
        raise TagError(f"{place}.type", "is required")
    if not isinstance(kind, str) or kind not in _FIELDS:
        is_known = isinstance(kind, str) and kind in _REFUSED
        raise TagError(f"{place}.type", f"{kind} cannot be enforced" if is_known else "is not a known type of format")
    known = _FIELDS[kind]
    _check_names(value, {"type", *known}, place)
    fields = {}
    for name, (read, *default) in known.items():
        at = f"{place}.{name}"
        if name in value:
            nested = read in (_inner, _inner_list, _tags, _border, _ends, _rules)
            fields[name] = read(value[name], at, level + 1) if nested else read(value[name], at)
        elif default:
            fields[name] = default[0]
        else:
            raise TagError(at, "is required")
    return _checked(TagFormat(kind, fields, place))


def _checked(form: TagFormat) -> TagFormat:
    """Checks that fields are consistent with each other."""
    fields, place = form.fields, form.place
    if form.type in ("star", "plus", "repeat") and fields["content"].is_open:
        raise TagError(f"{place}.content", "may end in any text, so it cannot be repeated")
    if form.type == "repeat" and fields["max"] != -1 and fields["min"] > fields["max"]:
        raise TagError(f"{place}.min", "must be at most max")
    if form.type == "tag" and fields["content"].is_open and "" in fields["end"]:
        raise TagError(f"{place}.end", "must not be empty, since the content may end in any text")
    if form.type in ("dispatch", "token_dispatch"):
        for index, (_, content) in enumerate(fields["rules"]):
            if content.is_open:
                raise TagError(f"{place}.rules[{index}]", "may end in any text, so more text cannot follow it")
    return form


def _check_names(value: Mapping[str, Any], known: set[str], place: str) -> None:
    if not value.keys() <= known:
        raise TagError(place, f"has a field besides {', '.join(sorted(known))}")


# Fields ---------------------------------------------------------------------------------------------------------------


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise TagError(place, "must be a string")
    return value


def _filled(value: Any, place: str) -> str:
    if not _string(value, place):
        raise TagError(place, "must not be empty")
    return str(value)


def _list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise TagError(place, "must be a list that is not empty")
    return value


def _strings(value: Any, place: str) -> list[str]:
    return [_filled(each, f"{place}[{index}]") for index, each in enumerate(_list(value, place))]


def _few_strings(value: Any, place: str) -> list[str]:
    return [] if value == [] else _strings(value, place)


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise TagError(place, "must be true or false")
    return value


def _number(value: Any, place: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise TagError(place, f"must be an integer, at least {least}")
    return value


def _number_or_none(value: Any, place: str, least: int = 0) -> int | None:
    return None if value is None else _number(value, place, least)


def _schema(value: Any, place: str) -> Any:
    if not isinstance(value, dict | bool | str):
        raise TagError(place, "must be a JSON schema")
    return value


def _own_schema(value: Any, place: str) -> Any:
    if isinstance(value, str):
        raise TagError(place, "must be an object or a boolean, not text")
    return _schema(value, place)


def _only(expected: Any, value: Any, place: str) -> Any:
    if value != expected:
        shown = {False: "false", None: "null"}.get(expected, expected) if not isinstance(expected, list) else "[]"
        raise TagError(place, f"cannot be enforced; only {shown} can")
    return value


def _token(value: Any, place: str) -> int | str:
    return _filled(value, place) if isinstance(value, str) else _number(value, place)


def _tokens(value: Any, place: str) -> list[int | str]:
    return [_token(each, f"{place}[{index}]") for index, each in enumerate(_list(value, place))]


def _few_tokens(value: Any, place: str) -> list[int | str]:
    return [] if value == [] else _tokens(value, place)


def _inner(value: Any, place: str, level: int) -> TagFormat:
    return _format(value, place, level)


def _inner_list(value: Any, place: str, level: int) -> list[TagFormat]:
    return [_format(each, f"{place}[{index}]", level) for index, each in enumerate(_list(value, place))]


def _tags(value: Any, place: str, level: int) -> list[TagFormat]:
    tags = [_format(each, f"{place}[{index}]", level, "tag") for index, each in enumerate(_list(value, place))]
    for tag in tags:
        if tag.type != "tag":
            raise TagError(tag.place, "must be a tag")
    return tags


def _border(value: Any, place: str, level: int) -> str | TagFormat:
    """Reads the beginning of a tag: a string, or a format for a token."""
    if isinstance(value, str):
        return value
    form = _format(value, place, level, "token")
    if form.type != "token":
        raise TagError(place, "must be a string or a token")
    return form


def _ends(value: Any, place: str, level: int) -> list[str | TagFormat]:
    if isinstance(value, list):
        return [_string(each, f"{place}[{index}]") for index, each in enumerate(_list(value, place))]
    return [_border(value, place, level)]


def _rules(value: Any, place: str, level: int) -> list[tuple[int | str, TagFormat]]:
    rules = []
    for index, rule in enumerate(_list(value, place)):
        at = f"{place}[{index}]"
        if not isinstance(rule, list) or len(rule) != 2:
            raise TagError(at, "must be a list of a pattern and a format")
        rules.append((_token(rule[0], f"{at}[0]"), _format(rule[1], f"{at}[1]", level)))
    return rules


_Field = tuple[Callable[..., Any], *tuple[Any, ...]]
_TAGS: Mapping[str, _Field] = {
    "tags": (_tags,),
    "at_least_one": (_flag, False),
    "stop_after_first": (_flag, False),
}
_FIELDS: Mapping[str, Mapping[str, _Field]] = {
    "const_string": {"value": (_string,)},
    "json_schema": {
        "json_schema": (_own_schema,),
        "max_whitespace_cnt": (partial(_number_or_none, least=1), None),
        "style": (partial(_only, "json"), "json"),
        "any_order": (partial(_only, False), False),
        "excludes": (partial(_only, []), []),
    },
    "regex": {"pattern": (_filled,)},
    "grammar": {"grammar": (_filled,)},
    "any_text": {
        "excludes": (_few_strings, []),
        "max_chars": (_number_or_none, None),
        "max_tokens": (partial(_only, None), None),
    },
    "tag": {"begin": (_border,), "content": (_inner,), "end": (_ends,)},
    "sequence": {"elements": (_inner_list,)},
    "or": {"elements": (_inner_list,)},
    "optional": {"content": (_inner,)},
    "star": {"content": (_inner,)},
    "plus": {"content": (_inner,)},
    "repeat": {"min": (_number,), "max": (partial(_number, least=-1),), "content": (_inner,)},
    "tags_with_separator": {**_TAGS, "separator": (_string,)},
    "triggered_tags": {**_TAGS, "triggers": (_strings,), "excludes": (_few_strings, [])},
    "dispatch": {"rules": (_rules,), "loop": (_flag, True), "excludes": (_few_strings, [])},
    "token": {"token": (_token,)},
    "exclude_token": {"exclude_tokens": (_few_tokens, [])},
    "any_tokens": {"exclude_tokens": (_few_tokens, []), "max_tokens": (_number_or_none, None)},
    "token_triggered_tags": {**_TAGS, "trigger_tokens": (_tokens,), "exclude_tokens": (_few_tokens, [])},
    "token_dispatch": {"rules": (_rules,), "loop": (_flag, True), "exclude_tokens": (_few_tokens, [])},
}
"""The fields of each type of format: how they are read, and their defaults."""
_REFUSED = frozenset({"qwen_xml_parameter"})
WORDS = frozenset(
    {*_FIELDS, *(name for fields in _FIELDS.values() for name in fields), *_REFUSED}
    | {"type", "format", "structural_tag", "structures", "schema"}
)
"""The names in structural tags. Errors keep them, because clients need them to find the error."""
