"""One stored response: what the gateway keeps of a request and its answer."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.responses.chunking import encoded
from penstock.clients.gateway.schemas.responses import MessageItem, ResponsesRequest

OVERHEAD_BYTES = 1024
"""Counted for each response, besides its JSON."""
_ID_BYTES = 24
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "additional_tools": "at",
    "reasoning": "rs",
}
_encode, _decode = msgspec.json.encode, msgspec.json.decode


def new_response_id() -> str:
    """Returns a random id, which cannot be guessed."""
    return f"resp_{secrets.token_hex(_ID_BYTES)}"


class Content(NamedTuple):
    """What a response consists of, besides its input."""

    fields: bytes = b"{}"
    """JSON: the response without its output."""
    output: bytes = b'{"output":[]}'
    log: bytes = b""
    """The events of a response that was streamed in the background, by ``EventLog``."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all parts."""
        return len(self.fields) + len(self.output) + len(self.log)

    @classmethod
    async def encode(cls, response: Json, log: bytes = b"") -> "Content":
        """Encodes a response; other tasks run while a large output is encoded."""
        fields = {name: value for name, value in response.items() if name != "output"}
        return cls(_encode(fields), await encoded({"output": response["output"]}), log)

    def as_json(self) -> bytes:
        """Returns the whole response."""
        return self.fields[:-1] + b"," + self.output[1:]

    def with_fields(self, fields: Json) -> "Content":
        """Returns this content with other values of some fields, and without its log, which would contradict them."""
        return Content(_encode(_decode(self.fields) | fields), self.output)

    def output_items(self) -> list[Any]:
        """Returns the items of the output."""
        items: list[Any] = _decode(self.output)["output"]
        return items

    def field(self, name: str) -> Any:
        """Returns one of the fields."""
        return _decode(self.fields)[name]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response with its input."""

    id: str
    tenant: str
    previous_id: str
    """The response that it continues; empty: none."""
    session_id: str
    """The service's session of all turns of the conversation."""
    input: bytes
    """JSON: the list of its own input items, without those of earlier turns."""
    content: Content = field(default_factory=Content)
    is_live: bool = False
    """Whether it is still generated, in the background."""
    expires_at: float = 0.0
    """In seconds since 1970."""
    is_hidden: bool = False
    """Whether its life has ended, and only other responses that continue it need its items."""
    num_users: int = 0
    """How many stored responses continue it, and how many requests that may be stored do."""

    @property
    def num_bytes(self) -> int:
        """What it counts against the limits."""
        return OVERHEAD_BYTES + len(self.input) + self.content.num_bytes

    def input_items(self) -> list[Any]:
        """Returns its own input items."""
        items: list[Any] = _decode(self.input)
        return items


def encoded_input(body: ResponsesRequest) -> bytes:
    """Returns the input of a request as a list of items in JSON, each with an id."""
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    return _encode([_with_id(_item_json(item)) for item in items])


def page_of_items(items: Sequence[Any], limit: int, *, after: str | None, newest_first: bool) -> Json | None:
    """Returns a page of a list of items, in OpenAI's format; None if no item has the id ``after``."""
    ordered = items[::-1] if newest_first else items
    begin = 0
    if after is not None:
        begin = next((at + 1 for at, item in enumerate(ordered) if item["id"] == after), 0)
        if not begin:
            return None
    page = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(ordered),
    }


def _item_json(item: Any) -> Json:
    found: Json = item.model_dump(exclude_none=True, by_alias=True)
    if isinstance(item, MessageItem):
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            found["content"] = [{"type": kind, "text": item.content}]
        for part in found["content"]:
            if part["type"] == "output_text":
                part["annotations"] = []
        found["status"] = "completed"
    return found


def _with_id(item: Json) -> Json:
    if "id" not in item:
        item["id"] = f"{_PREFIXES[item['type']]}_{secrets.token_hex(_ID_BYTES)}"
    return item
