"""How many parts a message has, counted before it is parsed.

protobuf's parser holds Python's lock, and so the event loop, until it is done, and bounds are looked at after it: 8 MiB
of empty items are millions of objects, and take it a quarter of a second. This stops at the first part too many.
"""

from collections.abc import Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor

from penstock.service.errors import Reason, ServiceError

MAX_PARTS = 40_000
"""Fields, with those of the messages inside. 4,096 messages of a chat with 4,096 tool calls have 36,868."""
_SHORT_BYTES = 64 << 10
"""What is shorter is parsed in 2 ms, whatever it holds."""
_MAX_VARINT_BYTES = 10
_BYTES = 2
_FIXED = {1: 8, 5: 4, 3: 0, 4: 0}
"""Kinds of fields on the wire, as their tags tell them, by their size: numbers, and the beginning and end of a group,
what is inside of which counts as if it were outside. Besides these and _BYTES there are varints, and what stops the
parser."""


def check_parts(raw: bytes, message: Descriptor) -> None:
    """Raises ServiceError TOO_EXPENSIVE. A part takes 0.4 to 0.7 us; a string or a packed list is one, however long."""
    if len(raw) > _SHORT_BYTES and _has_too_many(raw, message):
        raise ServiceError(
            Reason.TOO_EXPENSIVE,
            f"a message has at most {MAX_PARTS:,} fields, with those of the messages inside: send fewer items at once",
        )


def _has_too_many(raw: bytes, message: Descriptor) -> bool:
    num_parts = 0
    parts = [(0, len(raw), message)]
    while parts:
        at, end, message = parts.pop()
        messages = _messages(message)
        try:
            while at < end:
                num_parts += 1
                if num_parts > MAX_PARTS:
                    return True
                tag = raw[at]
                at += 1
                if tag >= 0x80:
                    tag, at = _varint(raw, at - 1)
                kind = tag & 7
                if kind in _FIXED:
                    at += _FIXED[kind]
                    continue
                value = raw[at]
                at += 1
                if value >= 0x80:
                    value, at = _varint(raw, at - 1)
                if kind == _BYTES:
                    inner = messages.get(tag >> 3)
                    if inner is not None and value:
                        parts.append((at, min(at + value, end), inner))
                    at += value
        except IndexError:
            return False  # it breaks off: the parser stops there too, and says so
    return False


@cache
def _messages(message: Descriptor) -> Mapping[int, Descriptor]:
    """Those of its fields that are messages."""
    return {field.number: field.message_type for field in message.fields if field.message_type is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends. Raises IndexError where it doesn't."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = raw[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise IndexError
