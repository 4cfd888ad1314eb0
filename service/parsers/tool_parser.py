"""The base of tool call parsers: content, calls that are reported as they arrive, and backtracking."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.service.parsers.base import AnswerParser, ParsedDelta, Schema, ToolCallDelta, merge_calls
from penstock.service.parsers.incremental_text import HeldSpace, IncrementalText, Reading

_EXPECTED_KEYS = frozenset({"id", "type"})


class ContentParser:
    """Treats all text as content."""

    def __init__(self) -> None:
        self._num_read = 0

    def feed(self, text: str) -> ParsedDelta:
        begin, self._num_read = self._num_read, self._num_read + len(text)
        return ParsedDelta(text, spans=((begin, self._num_read),))

    def end(self) -> ParsedDelta:
        return ParsedDelta()


class OnlyCallsParser:
    """Drops the content of an answer that a grammar limits to calls: it is a part of a call that was cut off."""

    def __init__(self, calls: AnswerParser) -> None:
        self._calls = calls

    def feed(self, text: str) -> ParsedDelta:
        return self._without_content(self._calls.feed(text))

    def end(self) -> ParsedDelta:
        return self._without_content(self._calls.end())

    @staticmethod
    def _without_content(delta: ParsedDelta) -> ParsedDelta:
        return replace(delta, content="", calls=tuple(replace(call, at=0) for call in delta.calls), spans=())


class ToolCallParser:
    """The base class of formats, whose ``_read`` parses the text.

    A reported call is never withdrawn. A failed attempt at one goes back to the end of the reported part, and the text
    from there on is content: none is lost, except white space next to a call.
    """

    def __init__(self, tools: Mapping[str, Schema | None], parallel_calls: bool, new_id: Callable[[], str]) -> None:
        """``tools``: the request's tools, each with the schema of its arguments. Without ``parallel_calls`` only the
        first call is reported. ``new_id`` makes ids for calls."""
        self._tools = tools
        self._parallel_calls = parallel_calls
        self._new_id = new_id
        self._source = IncrementalText()
        self._content: list[str] = []
        self._spans: list[tuple[int, int]] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._content_length = 0
        self._num_read = 0
        self._num_marker_chars = 0
        """The length of what was read of a marker: it is content if no call follows."""
        self._held_space = HeldSpace()
        """White space after content: it is dropped if a call follows."""
        self._after_call = False
        self._reading = self._read()

    def feed(self, text: str) -> ParsedDelta:
        self._num_read += len(text)
        self._source.append_text(text)
        next(self._reading, None)
        return replace(self._take(), num_held=self._num_held)

    def end(self) -> ParsedDelta:
        self._source.ended = True
        next(self._reading, None)
        self._add_rest(self._source.num_unread)
        self._release_space(self._source.at)
        return self._take()

    def _read(self) -> Reading[None]:
        """Parses the text to its end."""
        raise NotImplementedError

    @property
    def _num_held(self) -> int:
        kept_from = self._source.kept_from
        known = self._source.at if kept_from is None else kept_from
        return self._num_read - known + self._num_marker_chars + self._held_space.length

    def _take(self) -> ParsedDelta:
        piece = ParsedDelta("".join(self._content), calls=merge_calls(self._calls), spans=tuple(self._spans))
        self._content.clear()
        self._content_length = 0
        self._spans.clear()
        self._calls.clear()
        return piece

    def _add_content(self, text: str, end: int) -> None:
        """Adds content that ends at position ``end`` of the text."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        visible, num_held = self._held_space.append_text(text)
        self._add_text(visible, end - num_held - len(visible))

    def _add_text(self, text: str, begin: int) -> None:
        if text:
            self._content.append(text)
            self._content_length += len(text)
            self._spans.append((begin, begin + len(text)))

    def _release_space(self, end: int) -> None:
        """Adds the white space that was held back, which ends at position ``end``."""
        space = self._held_space.take_text()
        self._add_text(space, end - len(space))

    def _add_rest(self, length: int) -> None:
        """Reads ``length`` available characters as content."""
        self._add_content(self._source.read_text(length), self._source.at)

    def _open_call(self, name: str, call_id: str = "") -> None:
        self._held_space.take_text()
        self._after_call = True
        self._num_calls += 1
        self._add_call(ToolCallDelta(self._num_calls - 1, call_id or self._new_id(), name))

    def _add_arguments(self, text: str) -> None:
        self._add_call(ToolCallDelta(self._num_calls - 1, arguments=text))

    def _break_off(self) -> None:
        """Marks the arguments of the last call as incomplete."""
        self._add_call(ToolCallDelta(self._num_calls - 1, breaks_off=True))

    def _add_call(self, piece: ToolCallDelta) -> None:
        self._source.keep()
        self._num_marker_chars = 0
        if self._parallel_calls or piece.index == 0:
            self._calls.append(replace(piece, at=self._content_length))

    def _add_here(self, text: str) -> None:
        """Adds content that ends at the current position."""
        self._add_content(text, self._source.at)

    def _read_content(self, marker: str, take: Callable[[str], None] | None = None) -> Reading[bool]:
        """Reads content up to a marker and the marker itself; False at the end of the text. With ``take``, passes the
        text to it instead."""
        source, take = self._source, take or self._add_here
        while True:
            found = source.find(marker)
            if found >= 0:
                take(source.read_text(found))
                source.at += len(marker)
                return True
            take(source.read_text(source.num_unread - (0 if source.ended else source.num_held(marker))))
            if source.ended:
                return False
            yield

    def _read_content_to(self, begin: str, *markers: str, take: Callable[[str], None] | None = None) -> Reading[str]:
        """Reads content up to one of the markers, which all have the same beginning, and the marker itself. Returns the
        marker; empty at the end of the text. With ``take``, passes the text to it instead."""
        take = take or self._add_here
        while (yield from self._read_content(begin, take)):
            self._num_marker_chars = len(begin)
            found = ""
            for marker in markers:
                if (yield from self._source.starts_with(marker[len(begin) :])):
                    found = marker
                    break
            self._num_marker_chars = 0
            if found:
                return found
            take(begin)
        return ""

    def _read_rest(self) -> Reading[None]:
        """Reads content to the end of the text."""
        while not self._source.ended:
            self._add_rest(self._source.num_unread)
            yield

    def _read_calls(self, attempt: Reading[bool], marker: str = "") -> Reading[bool]:
        """Attempts to read one or more calls; returns whether that succeeded. The preceding ``marker`` is content if
        there is no call."""
        num_calls = self._num_calls
        self._source.keep()
        self._num_marker_chars = len(marker)
        found = yield from attempt
        self._num_marker_chars = 0
        if found:
            self._source.end_keep()
            return True
        self._source.go_back()
        if num_calls == self._num_calls:
            self._add_content(marker, self._source.at)
        return False

    def _read_object(self, *, must_be_known: bool = False) -> Reading[bool]:
        """Reads {"name": ..., "arguments": {...}}; returns whether the whole object matched. ``must_be_known``:
        requires the name of one of the request's tools, and no other keys than those of a call."""
        source, call = self._source, _ObjectCall(self._open_call, self._add_arguments)
        if (yield from source.after_space()) != "{":
            return False
        source.at += 1
        while True:
            if (yield from source.after_space()) != '"':
                return False
            key = yield from source.string()
            if key is None or (yield from source.after_space()) != ":":
                return False
            source.at += 1
            first = yield from source.after_space()
            if key == "name":
                name = (yield from source.string()) if first == '"' else None
                if not name or call.name or (must_be_known and name not in self._tools):
                    return False
                call.set_name(name)
            elif key in ("arguments", "parameters"):
                if call.has_arguments or not (yield from self._read_arguments(call, first)):
                    return False
            elif (must_be_known and key not in _EXPECTED_KEYS) or not (yield from self._pass_value(first)):
                return False
            separator = yield from source.after_space()
            if separator not in (",", "}"):
                return False
            source.at += 1
            if separator == "}":
                return call.end()

    def _read_arguments(self, call: "_ObjectCall", first: str) -> Reading[bool]:
        """Reads an object, or a string with the text of one, or null."""
        call.has_arguments = True
        if first == "{":
            whole = yield from self._source.nested(call.append_text)
            if call.is_open and not whole:
                self._break_off()
            return whole
        if first == '"':
            text = yield from self._source.string()
            if text is not None:
                call.append_text(text or "{}")
            return text is not None
        is_null = (yield from self._source.scalar()) == "null"
        if is_null:
            call.append_text("{}")
        return is_null

    def _pass_value(self, first: str) -> Reading[bool]:
        if first in ("{", "["):
            return (yield from self._source.nested(lambda text: None))
        if first == '"':
            return (yield from self._source.string()) is not None
        return bool((yield from self._source.scalar()))


class _ObjectCall:
    """A call whose name may come after its arguments."""

    def __init__(self, open_call: Callable[[str], None], add_arguments: Callable[[str], None]) -> None:
        self._open_call = open_call
        self._add_arguments = add_arguments
        self._early: list[str] = []
        self.is_open = False
        self.name = ""
        self.has_arguments = False

    def set_name(self, name: str) -> None:
        self.name = name
        if self._early:
            self.append_text("".join(self._early))

    def append_text(self, text: str) -> None:
        if not self.name:
            self._early.append(text)
            return
        if not self.is_open:
            self.is_open = True
            self._open_call(self.name)
        self._add_arguments(text)

    def end(self) -> bool:
        """Ends the object; returns whether it is a call."""
        if self.name and not self.has_arguments:
            self.append_text("{}")
        return bool(self.name)
