"""Writes an answer in the format of Anthropic's Messages API: content blocks, and typed events as they grow.

The same writer serves both forms: a whole answer is built from the events of a stream. Independent of HTTP and the
service.
"""

import msgspec
from pydantic_core import from_json

from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.responses.chat_stream import Part
from penstock.clients.output import ToolCallPart

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEvents:
    """Converts the parts of one answer to the events of a message."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._open: str | None = None
        """The type of the last block, if it is incomplete."""
        self._arguments: list[str] = []
        """The arguments of the open call, which are sent when they are complete: clients read them as JSON at once."""
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    def begin(self, message: Json) -> list[Json]:
        """Returns the event before any output. ``message`` is the answer without its content and its end."""
        return [{"type": "message_start", "message": {**message, "content": [], **self._end}}]

    def add_part(self, part: Part) -> list[Json]:
        """Adds a part of the answer."""
        events: list[Json] = []
        calls = list(part.calls)
        while calls and not calls[0].id:  # finish the open call before the content that follows it
            events += self._add_call(calls.pop(0))
        events += self._add("thinking", "thinking_delta", part.reasoning)
        begin = 0
        for call in calls:
            at = call.text_offset - part.content_at
            events += self._add("text", "text_delta", part.content[begin:at]) + self._add_call(call)
            begin = at
        events += self._add("text", "text_delta", part.content[begin:])
        if part.finish_reason is not None:
            self._end["stop_reason"] = STOP_REASONS[part.finish_reason]
            if part.finish_reason == "stop" and isinstance(part.stop_reason, str):
                self._end = {"stop_reason": "stop_sequence", "stop_sequence": part.stop_reason}
        return events

    def end(self, usage: Json) -> list[Json]:
        """Ends the answer, which has at least one block."""
        events = [] if self._num_blocks or self._open else self._start({"type": "text", "text": ""})
        events += self._close()
        return [*events, {"type": "message_delta", "delta": self._end, "usage": usage}, {"type": "message_stop"}]

    def _add(self, kind: str, delta: str, text: str) -> list[Json]:
        """Adds text or reasoning."""
        if not text:
            return []
        events: list[Json] = []
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = [*self._close(), *self._start({"type": kind, kind: "", **signature})]
        return [*events, self._delta({"type": delta, kind: text})]

    def _add_call(self, piece: ToolCallPart) -> list[Json]:
        events: list[Json] = []
        if piece.id:
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            events = [*self._close(), *self._start(block)]
        self._arguments.append(piece.arguments)
        return events

    def _start(self, block: Json) -> list[Json]:
        self._open = block["type"]
        return [{"type": "content_block_start", "index": self._num_blocks, "content_block": block}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close(self) -> list[Json]:
        if self._open is None:
            return []
        events: list[Json] = []
        if self._open == "thinking":  # clients expect a signature, but only Anthropic's own service checks it
            events = [self._delta({"type": "signature_delta", "signature": ""})]
        elif self._open == "tool_use":
            events = [self._delta({"type": "input_json_delta", "partial_json": _input("".join(self._arguments))})]
            self._arguments = []
        events.append({"type": "content_block_stop", "index": self._num_blocks})
        self._num_blocks += 1
        self._open = None
        return events


class WholeMessage:
    """Combines the events of an answer into one message."""

    def __init__(self) -> None:
        self._message: Json = {}
        self._blocks: list[Json] = []
        self._texts: list[list[str]] = []

    def add_chunk(self, chunk: Json) -> None:
        match chunk["type"]:
            case "message_start":
                self._message = chunk["message"]
            case "content_block_start":
                self._blocks.append(chunk["content_block"])
                self._texts.append([])
            case "content_block_delta" if chunk["delta"]["type"] != "signature_delta":
                delta = chunk["delta"]
                self._texts[-1].append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
            case "message_delta":
                self._message |= chunk["delta"]
                self._message["usage"] = chunk["usage"]

    def result(self) -> Json:
        content = [_whole_block(block, "".join(texts)) for block, texts in zip(self._blocks, self._texts, strict=True)]
        return self._message | {"content": content}


def _whole_block(block: Json, text: str) -> Json:
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    return block | {"input": from_json(text)}


def _input(arguments: str) -> str:
    """Returns the input of a call as JSON. If the call was cut off, it contains only the complete fields. If the
    arguments are not a JSON object, it is empty."""
    try:
        given = from_json(arguments, allow_partial=True)
    except ValueError:
        given = None
    return msgspec.json.encode(given if isinstance(given, dict) else {}).decode()
