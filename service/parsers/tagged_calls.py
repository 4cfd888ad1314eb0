"""Calls whose arguments are between tags, one pair for each: the formats of Qwen3-Coder, GLM-4.5 and MiniMax-M2."""

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.service.parsers.base import Schema
from penstock.service.parsers.incremental_text import Reading
from penstock.service.parsers.tool_parser import ToolCallParser
from penstock.service.parsers.typed_values import ArgumentValue, argument_types

_NAME = re.compile(r"[\w./:-]*")
_KEY = re.compile(r'[^<>"\n]*')


class CallTags(NamedTuple):
    """The tags of a format."""

    opens: str
    closes: str
    """The tags around one or more functions."""
    name: tuple[str, str]
    """What precedes and follows a function's name."""
    ends: str
    """What follows a function's arguments; empty: only ``closes``."""
    key: tuple[str, str]
    """What precedes and follows an argument's name."""
    value: tuple[str, str]
    """What precedes and follows an argument's value."""
    trims_line: bool
    """Whether a value has a line break before and after it."""
    has_bare_functions: bool = False
    """Whether models sometimes leave out ``opens``."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags that may be special tokens of a model."""
        tags = (self.opens, self.closes, self.ends, *self.key, *self.value)
        return tuple(dict.fromkeys(tag for tag in tags if tag.startswith("<") and tag.endswith(">")))


QWEN3_CODER = CallTags(
    "<tool_call>",
    "</tool_call>",
    name=("<function=", ">"),
    ends="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    trims_line=True,
    has_bare_functions=True,
)
GLM45 = CallTags(
    "<tool_call>",
    "</tool_call>",
    name=("", ""),
    ends="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    trims_line=False,
)
MINIMAX_M2 = CallTags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    name=('<invoke name="', '">'),
    ends="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    trims_line=False,
)


class TaggedCallParser(ToolCallParser):
    """Reads calls in the tags of ``tags``. Strings are reported as they arrive, other values when they are complete,
    since the schema's type may not match what the model writes."""

    tags: CallTags

    def __init__(self, tools: Mapping[str, Schema | None], parallel_calls: bool, new_id: Callable[[], str]) -> None:
        super().__init__(tools, parallel_calls, new_id)
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        """The types of arguments that have been looked up."""

    def _read(self) -> Reading[None]:
        tags = self.tags
        begin, markers = ("<", (tags.opens, tags.name[0])) if tags.has_bare_functions else (tags.opens, (tags.opens,))
        while marker := (yield from self._read_content_to(begin, *markers)):
            yield from self._read_calls(self._read_group(marker), marker)

    def _read_group(self, marker: str) -> Reading[bool]:
        """Reads the functions after ``opens``, or a function without it, whose name must be known then."""
        source, tags = self._source, self.tags
        is_bare = marker != tags.opens
        has_function = is_bare
        if not is_bare:
            yield from source.after_space()
            has_function = yield from source.starts_with(tags.name[0])
        if not has_function:
            return False
        while has_function:
            if not (yield from self._read_function(must_be_known=is_bare)):
                return False
            self._source.keep()
            yield from source.after_space()
            has_function = bool(tags.name[0]) and (yield from source.starts_with(tags.name[0]))
        yield from source.starts_with(tags.closes)
        return True

    def _read_function(self, *, must_be_known: bool) -> Reading[bool]:
        """Reads a function's name and arguments."""
        source, tags = self._source, self.tags
        name = yield from source.match(_NAME)
        if not name or (must_be_known and name not in self._tools):
            return False
        if not (yield from source.starts_with(tags.name[1])) or not (yield from self._is_function(name)):
            return False
        self._open_call(name)
        separator = "{"
        while True:
            yield from source.after_space()
            if (yield from source.starts_with(tags.key[0])):
                if not (yield from self._read_argument(name, separator)):
                    break
                separator = ", "
            elif (yield from self._is_at_end()):
                self._add_arguments("{}" if separator == "{" else "}")
                return True
            else:
                break
        source.go_back()
        self._break_off()
        return False

    def _is_function(self, name: str) -> Reading[bool]:
        """Whether a word is a function's name. If nothing marks it as one, an argument follows it, or it is known and
        has no arguments."""
        source, tags = self._source, self.tags
        if tags.name[0]:
            return True
        yield from source.after_space()
        if (yield from self._is_next(tags.key[0])):
            return True
        return name in self._tools and (yield from self._is_next(tags.closes))

    def _is_next(self, marker: str) -> Reading[bool]:
        """Returns whether a marker is next, without reading it."""
        found = yield from self._source.starts_with(marker)
        if found:
            self._source.at -= len(marker)
        return found

    def _is_at_end(self) -> Reading[bool]:
        """Reads the end of a function's arguments if it is next. Models sometimes leave out ``ends``."""
        source, tags = self._source, self.tags
        if tags.ends and (yield from source.starts_with(tags.ends)):
            return True
        return (yield from self._is_next(tags.closes))

    def _read_argument(self, function: str, separator: str) -> Reading[bool]:
        """Reads an argument from its name to the end of its value."""
        source, tags = self._source, self.tags
        key = yield from source.match(_KEY)
        if not key or not (yield from source.starts_with(tags.key[1])):
            return False
        if tags.value[0]:
            yield from source.after_space()
            if not (yield from source.starts_with(tags.value[0])):
                return False
        self._add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        value = ArgumentValue(self._types_of(function, key), tags.trims_line, self._add_arguments)
        if (yield from self._read_value(value)):
            value.end()
            return True
        value.break_off()
        return False

    def _read_value(self, value: ArgumentValue) -> Reading[bool]:
        """Reads a value and what ends it: its own tag, or if the model left that out, the next one. False if the text
        ends first."""
        source, tags = self._source, self.tags
        followers = (tags.key[0], tags.ends or tags.closes)
        ends = (tags.value[1], *followers)
        while True:
            found = source.find("<")
            text = source.read_text(source.num_unread if found < 0 else found)
            if text:
                value.append_text(text)
            if found >= 0:
                if (yield from source.starts_with(tags.value[1])):
                    return True
                for follower in followers:
                    if (yield from self._is_next(follower)):
                        return True
                if source.ended and any(source.num_held(marker) == source.num_unread for marker in ends):
                    return False
                value.append_text(source.read_text(1))
            elif source.ended:
                return False
            else:
                yield

    def _types_of(self, function: str, name: str) -> frozenset[str]:
        key = (function, name)
        if key in self._types:
            return self._types[key]
        types = argument_types(self._tools.get(function), name)
        if len(self._types) < _MAX_LOOKED_UP:
            self._types[key] = types
        return types


_MAX_LOOKED_UP = 1024


class Qwen3CoderParser(TaggedCallParser):
    """<tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call>"""

    tags = QWEN3_CODER


class Glm45Parser(TaggedCallParser):
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>...</arg_value></tool_call>"""

    tags = GLM45


class MinimaxM2Parser(TaggedCallParser):
    """<minimax:tool_call><invoke name="NAME"><parameter name="KEY">...</parameter></invoke></minimax:tool_call>"""

    tags = MINIMAX_M2
