"""Writes an answer in the format of the Responses API: items of output, and typed events for their growth.

One writer serves both forms: a whole answer is the response in the last event of a stream. Independent of HTTP and the
service.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from operator import itemgetter
from typing import ClassVar

from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.custom_tools import CustomInput
from penstock.clients.gateway.requests.response_tools import CallerTool
from penstock.clients.gateway.responses.chat_stream import Part
from penstock.clients.output import ToolCallPart


class ResponseEvents:
    """Converts the parts of one answer to the events of a response."""

    def __init__(self, response: Json, tool_named: Callable[[str], CallerTool] = CallerTool) -> None:
        """``response`` has the fields that the request determines; output, status and usage are filled in here.
        ``tool_named`` finds the caller's tool by the name in a call."""
        self.response = response | {
            "status": "in_progress",
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
        }
        self._tool_named = tool_named
        self._num_events = 0
        self._open: _Item | None = None
        """The last item, if it is incomplete."""

    def begin_response(self) -> list[Json]:
        """Returns the events before any output."""
        return [self._of_response("response.created"), self._of_response("response.in_progress")]

    def add_part(self, part: Part) -> list[Json]:
        """Adds a part of the answer."""
        events: list[Json] = []
        calls = list(part.calls)
        while calls and not calls[0].id:  # the rest of the open call comes before content that follows it
            events += self._call(calls.pop(0))
        if part.reasoning:
            events += self._switch_to(_Reasoning)
            events.append(self._delta(part.reasoning))
        begin = 0
        for call in calls:
            at = call.text_offset - part.content_at
            events += self._add_text(part, begin, at) + self._call(call)
            begin = at
        return events + self._add_text(part, begin, len(part.content))

    def end(self, usage: Json, *, is_cut: bool) -> list[Json]:
        """Ends the answer; ``is_cut``: whether it reached its limit of tokens."""
        events = [] if self._open or self.response["output"] else self._switch_to(_Message)
        events += self._close("incomplete" if is_cut else "completed")
        self.response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "usage": usage,
        }
        return [*events, self._of_response(f"response.{self.response['status']}")]

    def fail(self, code: str, message: str) -> list[Json]:
        """Ends an answer that failed; the output so far stays."""
        events = self._close("incomplete")
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [*events, self._of_response("response.failed")]

    def cancel(self) -> list[Json]:
        """Ends an answer that was cancelled; the output so far stays. OpenAI has no event of that name."""
        events = self._close("incomplete")
        self.response["status"] = "cancelled"
        return [*events, self._of_response("response.incomplete")]

    def _add_text(self, part: Part, begin: int, end: int) -> list[Json]:
        """Adds a range of a part's content to a message."""
        if begin == end:
            return []
        events = self._switch_to(_Message)
        assert isinstance(self._open, _Message)
        entries = part.content_logprobs
        first, last = (bisect_left(entries, at, key=itemgetter(0)) for at in (begin, end))
        of_part = [entry for _, entry in entries[first:last]]
        self._open.logprobs += of_part
        return [*events, self._delta(part.content[begin:end], logprobs=of_part)]

    def _call(self, piece: ToolCallPart) -> list[Json]:
        events: list[Json] = []
        if piece.id:
            events = self._close("completed")
            tool = self._tool_named(piece.name)
            kind = _CustomCall if tool.is_custom else _Call
            events += self._start(kind(self._next_id(kind.prefix), piece.id, tool))
        if piece.arguments:
            assert isinstance(self._open, _Call), "a call's first piece has its id"
            events += self._more(self._open.read(piece.arguments))
        if piece.is_incomplete and self._open is not None:
            self._open.breaks_off = True
        return events

    def _switch_to(self, kind: "type[_Message | _Reasoning]") -> list[Json]:
        """Opens an item of this kind, unless the open one is."""
        if isinstance(self._open, kind):
            return []
        return [*self._close("completed"), *self._start(kind(self._next_id(kind.prefix)))]

    def _start(self, item: "_Item") -> list[Json]:
        self._open = item
        added = self._event("response.output_item.added", {"item": item.as_json("in_progress")})
        if not item.has_part:
            return [added]
        return [added, self._of_item("response.content_part.added", {"part": item.part()})]

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        events = self._more(item.rest())
        events.append(self._of_item(f"{item.event}.done", item.whole()))
        if item.has_part:
            events.append(self._of_item("response.content_part.done", {"part": item.part()}))
        done = item.as_json("incomplete" if item.breaks_off else status)
        events.append(self._event("response.output_item.done", {"item": done}))
        self.response["output"].append(done)
        self._open = None
        return events

    def _more(self, text: str) -> list[Json]:
        return [self._delta(text)] if text else []

    def _delta(self, text: str, **more: object) -> Json:
        assert self._open is not None
        self._open.texts.append(text)
        return self._of_item(f"{self._open.event}.delta", {"delta": text, **more})

    def _of_item(self, kind: str, fields: Json) -> Json:
        assert self._open is not None
        where = {"content_index": 0} if self._open.has_part else {}
        return self._event(kind, {"item_id": self._open.id, **where, **fields})

    def _event(self, kind: str, fields: Json) -> Json:
        return self._numbered({"type": kind, "output_index": len(self.response["output"]), **fields})

    def _of_response(self, kind: str) -> Json:
        return self._numbered({"type": kind, "response": self.response | {"output": list(self.response["output"])}})

    def _numbered(self, event: Json) -> Json:
        self._num_events += 1
        return event | {"sequence_number": self._num_events - 1}

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response['id'].removeprefix('resp_')}{len(self.response['output'])}"


class _Item:
    """An item of output under construction; its kinds differ in names."""

    kind: str
    prefix: str
    event: str
    """The name of its events, before ``.delta`` and ``.done``."""
    constant: ClassVar[Json] = {}
    """Its fields that are always the same."""
    has_part = True
    """Whether its text is in a content part."""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.breaks_off = False
        """Whether it is a call with incomplete arguments."""
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def rest(self) -> str:
        """Returns the rest of its text, which is known only at the end."""
        return ""

    def part(self) -> Json:
        """Returns its only content part, so far."""
        raise NotImplementedError

    def whole(self) -> Json:
        """Returns the fields of its ``.done`` event."""
        return {"text": self.text}

    def as_json(self, status: str) -> Json:
        """Returns the item; while it is in progress, only the events have its content."""
        content = [] if status == "in_progress" else [self.part()]
        return {"type": self.kind, "id": self.id, **self.constant, "status": status, "content": content}


class _Message(_Item):
    kind = "message"
    prefix = "msg"
    event = "response.output_text"
    constant: ClassVar[Json] = {"role": "assistant"}

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self.logprobs: list[Json] = []

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def whole(self) -> Json:
        return {"text": self.text, "logprobs": list(self.logprobs)}


class _Reasoning(_Item):
    kind = "reasoning"
    prefix = "rs"
    event = "response.reasoning_text"
    constant: ClassVar[Json] = {"summary": []}

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class _Call(_Item):
    kind = "function_call"
    prefix = "fc"
    event = "response.function_call_arguments"
    key = "arguments"
    has_part = False

    def __init__(self, item_id: str, call_id: str, tool: CallerTool) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._tool = tool

    def read(self, arguments: str) -> str:
        """Reads more of the model's arguments; returns the new part of the text."""
        return arguments

    def whole(self) -> Json:
        return {"name": self._tool.name, self.key: self.text}

    def as_json(self, status: str) -> Json:
        named = {"type": self.kind, "id": self.id, "call_id": self._call_id, "name": self._tool.name}
        if self._tool.namespace is not None:
            named["namespace"] = self._tool.namespace
        return named | {self.key: self.text, "status": status}


class _CustomCall(_Call):
    kind = "custom_tool_call"
    prefix = "ctc"
    event = "response.custom_tool_call_input"
    key = "input"

    def __init__(self, item_id: str, call_id: str, tool: CallerTool) -> None:
        super().__init__(item_id, call_id, tool)
        self._input = CustomInput()

    def read(self, arguments: str) -> str:
        return self._input.append_arguments(arguments)

    def rest(self) -> str:
        return self._input.end()

    def whole(self) -> Json:
        return {self.key: self.text}
