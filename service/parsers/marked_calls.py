"""Calls that are JSON after a name, with a marker before, between and after them: the formats of DeepSeek and Kimi."""

import re

from penstock.service.parsers.incremental_text import Reading
from penstock.service.parsers.tool_parser import ToolCallParser

_NAME = re.compile(r"[\w.:-]*")
_INDEX = re.compile(r":[0-9]+\Z")


class MarkedCallParser(ToolCallParser):
    """Reads sections of calls, each of which begins with a marker; models sometimes leave out the section's own."""

    begins: str
    """The common beginning of the markers."""
    section_opens: tuple[str, ...]
    section_closes: tuple[str, ...]
    call_opens: str
    call_closes: str
    separator: str
    """The marker after a call's kind or name, before the rest of it."""

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """Returns the texts that may be special tokens of a model."""
        return (*cls.section_opens, *cls.section_closes, cls.call_opens, cls.call_closes, cls.separator)

    def _read(self) -> Reading[None]:
        markers = (*self.section_opens, self.call_opens)
        while marker := (yield from self._read_content_to(self.begins, *markers)):
            if (yield from self._read_calls(self._read_section(marker), marker)):
                yield from self._source.after_space()
                for closes in self.section_closes:
                    if (yield from self._source.starts_with(closes)):
                        break

    def _read_section(self, marker: str) -> Reading[bool]:
        source = self._source
        if marker != self.call_opens:
            yield from source.after_space()
            if not (yield from source.starts_with(self.call_opens)):
                return False
        while True:
            if not (yield from self._read_call()):
                return False
            source.keep()
            yield from source.after_space()
            yield from source.starts_with(self.call_closes)
            source.keep()
            yield from source.after_space()
            if not (yield from source.starts_with(self.call_opens)):
                return True

    def _read_call(self) -> Reading[bool]:
        """Reads a call between its markers. Returns whether it is complete."""
        raise NotImplementedError

    def _read_json(self, name: str, call_id: str = "") -> Reading[bool]:
        """Reads a call's arguments; returns whether they are a complete object."""
        if (yield from self._source.after_space()) != "{":
            return False
        self._open_call(name, call_id)
        whole = yield from self._source.nested(self._add_arguments)
        if not whole:
            self._break_off()
        return whole


class DeepSeekParser(MarkedCallParser):
    """<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a block of JSON, or in later models
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}"""

    begins = "<｜tool▁call"
    section_opens = ("<｜tool▁calls▁begin｜>",)
    section_closes = ("<｜tool▁calls▁end｜>",)
    call_opens = "<｜tool▁call▁begin｜>"
    call_closes = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"

    def _read_call(self) -> Reading[bool]:
        source = self._source
        yield from source.after_space()
        name = yield from source.match(_NAME)
        yield from source.after_space()
        if not name or not (yield from source.starts_with(self.separator)):
            return False
        if (yield from source.after_space()) == "{":
            return (yield from self._read_json(name))
        name = yield from source.match(_NAME)
        yield from source.after_space()
        if not name:
            return False
        is_block = yield from source.starts_with("```json")
        whole = yield from self._read_json(name)
        if whole and is_block:
            source.keep()
            yield from source.after_space()
            yield from source.starts_with("```")
        return whole


class KimiK2Parser(MarkedCallParser):
    """<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>"""

    begins = "<|tool_call"
    section_opens = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    section_closes = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call_opens = "<|tool_call_begin|>"
    call_closes = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"

    def _read_call(self) -> Reading[bool]:
        source = self._source
        yield from source.after_space()
        call_id = yield from source.match(_NAME)
        yield from source.after_space()
        name = _INDEX.sub("", call_id).removeprefix("functions.")
        if not name or not (yield from source.starts_with(self.separator)):
            return False
        return (yield from self._read_json(name, call_id if name != call_id else ""))
