"""The harmony format of gpt-oss: messages in channels, for reasoning, content and calls."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.service.parsers.base import ParsedDelta, Schema
from penstock.service.parsers.incremental_text import Reading
from penstock.service.parsers.tool_parser import ToolCallParser

HARMONY = "harmony"
"""The name of the format, which is one of calls and of reasoning."""
_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
HARMONY_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
"""The texts of the format that are special tokens of its models."""
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s<]*")
_MAX_WORDS = 5
"""The limit on parts of a message's header: its recipient, channel and the type of its content."""
_Take = Callable[[str], None]


class MessageHeader(NamedTuple):
    """What precedes a message's text."""

    channel: str
    """Empty if the model left it out."""
    recipient: str
    """What the message calls, or empty."""


class HarmonyParser(ToolCallParser):
    """Reads <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>... Content is the
    text of messages in any other channel than the one for reasoning, and all text that is not in a message."""

    def __init__(
        self,
        tools: Mapping[str, Schema | None],
        parallel_calls: bool,
        new_id: Callable[[], str],
        *,
        has_calls: bool = True,
        has_reasoning: bool = True,
        in_reasoning: bool = False,
    ) -> None:
        """Without ``has_calls``, calls are content. Without ``has_reasoning``, so is the reasoning. ``in_reasoning``:
        the prompt ended inside the reasoning."""
        super().__init__(tools, parallel_calls, new_id)
        self._has_calls = has_calls
        self._has_reasoning = has_reasoning
        self._in_reasoning = in_reasoning
        self._reasoning: list[str] = []
        self._reasoning_spans: list[tuple[int, int]] = []
        self._has_reasoned = False
        self._begins_reasoning = False
        """Whether no text of the current message of reasoning has been read."""

    def _read(self) -> Reading[None]:
        if self._in_reasoning:
            take: _Take = self._add_reasoning
        else:
            take = (yield from self._read_message("")) or self._add_here
        while marker := (yield from self._read_content_to("<|", *_ENDS, _START, _CHANNEL, take=take)):
            self._release_space(self._source.at - len(marker))
            if marker in _ENDS:
                take = self._add_here
                continue
            begun = yield from self._read_message(marker)
            if begun is None:  # the marker begins no message
                take(marker)
            else:
                take = begun

    def _take(self) -> ParsedDelta:
        reasoning, spans = "".join(self._reasoning), tuple(self._reasoning_spans)
        self._reasoning.clear()
        self._reasoning_spans.clear()
        return replace(super()._take(), reasoning=reasoning, reasoning_spans=spans)

    def _add_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._begins_reasoning and self._has_reasoned:
            self._reasoning.append("\n")
        self._begins_reasoning = False
        self._has_reasoned = True
        self._reasoning.append(text)
        end = self._source.at
        self._reasoning_spans.append((end - len(text), end))

    def _read_message(self, marker: str) -> Reading[_Take | None]:
        """Reads what follows a marker: the header of a message, and a whole call. Returns what the text that follows
        is passed to; None if there is no message. Without a marker the message began in the prompt."""
        source = self._source
        source.keep()
        self._num_marker_chars = len(marker)
        header = yield from self._read_header(marker)
        has_call = header is not None and bool(header.recipient) and (yield from self._read_call(header.recipient))
        self._num_marker_chars = 0
        if header is None:
            source.go_back()
            return None
        if header.recipient:
            if not has_call:
                end = source.at
                source.go_back()
                self._add_here(marker + source.read_text(end - source.at))
            source.end_keep()
            return self._add_here
        source.end_keep()
        if header.channel != "analysis" or not self._has_reasoning:
            return self._add_here
        self._begins_reasoning = True
        return self._add_reasoning

    def _read_call(self, recipient: str) -> Reading[bool]:
        """Reads a call's arguments. Returns whether there is a call; if not, nothing is read."""
        source = self._source
        name = recipient.removeprefix("functions.")
        if not (self._has_calls and name and (name != recipient or name in self._tools)):
            return False  # a tool of the model's own, which is not offered to it
        begin = source.at
        if (yield from source.after_space()) != "{":
            source.at = begin
            return False
        self._open_call(name)
        if not (yield from source.nested(self._add_arguments)):
            self._break_off()
        return True

    def _read_header(self, marker: str) -> Reading[MessageHeader | None]:
        """Reads the header of an assistant's message up to its text; None if it is not one."""
        source = self._source
        if marker == _START and not (yield from source.starts_with("assistant")):
            return None
        channel = (yield from source.match(_WORD)) if marker == _CHANNEL else ""
        recipient = ""
        for _ in range(_MAX_WORDS):
            yield from source.match(_SPACE)
            if (yield from source.starts_with(_MESSAGE)):
                return MessageHeader(channel, recipient)
            if (yield from source.starts_with(_CHANNEL)):
                word = yield from source.match(_WORD)
                if channel or not word:
                    return None
                channel = word
                continue
            names_type = yield from source.starts_with(_CONSTRAIN)
            word = yield from source.match(_WORD)
            if not (word or names_type) or not (marker or channel or recipient or word.startswith("to=")):
                return None
            if word.startswith("to="):
                recipient = word.removeprefix("to=")
        return None
