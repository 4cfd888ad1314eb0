"""Calls in the notation of Gemma 4 and FunctionGemma: JSON with bare keys, and with a marker around strings."""

import json
import re
from collections.abc import Callable

from penstock.service.parsers.incremental_text import Reading
from penstock.service.parsers.tool_parser import ToolCallParser
from penstock.service.parsers.typed_values import json_escaped, typed_value

_NAME = re.compile(r"[\w.:-]*")
_KEY = re.compile(r"[^:,{}\[\]<]*")
_SCALAR = re.compile(r"[^,{}\[\]<]*")
_CLOSERS = {"{": "}", "[": "]"}
_SCALAR_TYPES = frozenset({"null", "boolean", "number"})


class Gemma4Parser(ToolCallParser):
    """<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>"""

    opens = "<|tool_call>"
    closes = "<tool_call|>"
    quote = '<|"|>'

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Returns the texts that may be special tokens of a model."""
        return cls.opens, cls.closes, cls.quote

    def _read(self) -> Reading[None]:
        while (yield from self._read_content(self.opens)):
            if (yield from self._read_calls(self._read_call(), self.opens)):
                yield from self._source.after_space()
                yield from self._source.starts_with(self.closes)

    def _read_call(self) -> Reading[bool]:
        source = self._source
        if not (yield from source.starts_with("call:")):
            return False
        name = yield from source.match(_NAME)
        if not name or (yield from source.after_space()) != "{":
            return False
        self._open_call(name)
        if (yield from self._read_value()):
            return True
        source.go_back()
        self._break_off()
        return False

    def _read_value(self) -> Reading[bool]:
        """Reads an object, whose brace is next, and reports its JSON as it arrives; returns whether it is complete."""
        source = self._source
        closers: list[str] = []
        while True:
            char = yield from source.after_space()
            if char in _CLOSERS:
                source.at += 1
                closers.append(_CLOSERS[char])
                self._add_arguments(char)
                if (yield from source.after_space()) != closers[-1]:
                    if not (yield from self._read_key(closers, "")):
                        return False
                    continue
            elif not (yield from self._read_plain()):
                return False
            if not (yield from self._read_closers(closers)):
                return False
            if not closers:
                return True

    def _read_closers(self, closers: list[str]) -> Reading[bool]:
        """Reads what ends values up to the next value. False if something else is there."""
        source = self._source
        while closers:
            char = yield from source.after_space()
            if char == ",":
                source.at += 1
                return (yield from self._read_key(closers, ", "))
            if char != closers[-1]:
                return False
            source.at += 1
            self._add_arguments(closers.pop())
        return True

    def _read_key(self, closers: list[str], separator: str) -> Reading[bool]:
        """Reads the key of an object's next value; a list has none. Reports the separator before it."""
        source = self._source
        if closers[-1] == "]":
            self._add_arguments(separator)
            return True
        yield from source.after_space()
        if (yield from source.starts_with(self.quote)):
            parts: list[str] = []
            if not (yield from self._read_to_quote(parts.append)):
                return False
            key = "".join(parts)
            yield from source.after_space()
        else:
            key = (yield from source.match(_KEY)).strip()
        if not key or not (yield from source.starts_with(":")):
            return False
        self._add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        return True

    def _read_plain(self) -> Reading[bool]:
        """Reads a string, number, boolean or null."""
        source = self._source
        if (yield from source.starts_with(self.quote)):
            self._add_arguments('"')
            whole = yield from self._read_to_quote(self._add_part)
            if whole:
                self._add_arguments('"')
            return whole
        text = (yield from source.match(_SCALAR)).strip()
        if not text:
            return False
        ends = yield from source.char()
        self._add_arguments(typed_value(text, _SCALAR_TYPES) if ends else text)
        return bool(ends)

    def _add_part(self, text: str) -> None:
        self._add_arguments(json_escaped(text))

    def _read_to_quote(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads the rest of a string and the marker that ends it, and passes it on as it arrives; False if the text
        ends first."""
        source = self._source
        while True:
            found = source.find(self.quote)
            text = source.read_text(found if found >= 0 else source.num_unread - source.num_held(self.quote))
            if text:
                take(text)
            if found >= 0:
                source.at += len(self.quote)
                return True
            if source.ended:
                return False
            yield


class FunctionGemmaParser(Gemma4Parser):
    """<start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>"""

    opens = "<start_function_call>"
    closes = "<end_function_call>"
    quote = "<escape>"
