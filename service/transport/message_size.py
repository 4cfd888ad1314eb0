"""Counts the parts of a message and the entries of its maps before it is parsed, and stops at the first one too many.

protobuf's parser holds the GIL, and so blocks the event loop, until it is done, and bounds are checked after it. 8 MiB
of empty items are millions of objects, and take a quarter of a second; a map with colliding keys takes time in
proportion to the square of their number.
"""

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from penstock.service.config.field_rules import Biases
from penstock.service.config.limits import FIELD_BOUNDS
from penstock.service.errors import Reason, ServiceError, invalid

MAX_PARTS = 40_000
"""Limit on fields, including those of inner messages. 4,096 chat messages with 4,096 tool calls have 36,868."""
MAX_MAP_ENTRIES = 2048
"""Limit on the entries of all maps of a message. It is higher than any map's own limit, so that a map that is a little
too large fails only its own request. This many entries with colliding keys take 3 ms."""
SHORT_BYTES = 64 << 10
"""A message of at most this size that has no maps is parsed within 2 ms."""
_SLICE_PARTS = 4096
"""Parts that are counted before the event loop runs again, in about 1 ms."""
_MAX_VARINT_BYTES = 10
_BYTES = 2
_FIXED = {1: 8, 5: 4, 3: 0, 4: 0}
"""Sizes of fields by wire type: fixed-size numbers, and the start and end of a group, whose fields count as if they
were outside. The other wire types are _BYTES, varints, and invalid ones, which stop the parser."""

_NO_MESSAGE = (None, False)


async def check_parts(raw: bytes, message: Descriptor) -> None:
    """Raises ServiceError TOO_EXPENSIVE for too many parts. A part takes 0.4 to 0.7 us; a string or a packed list of
    any length is one part."""
    if len(raw) > SHORT_BYTES or _may_have_many_entries(raw, message):
        for _ in _count(raw, message):
            await asyncio.sleep(0)


def _may_have_many_entries(raw: bytes, message: Descriptor) -> bool:
    """Returns whether the maps may have too many entries. Each entry begins with the map's tag, so the tag's first
    byte, which is fast to count, occurs at least as often. In a tag that is longer than necessary, that byte has its
    highest bit set."""
    firsts = {field.number << 3 & 0x7F | _BYTES for field in _maps_in(message)}
    if not firsts or len(raw) <= 2 * MAX_MAP_ENTRIES:
        return False
    return sum(raw.count(first) + raw.count(first | 0x80) for first in firsts) > MAX_MAP_ENTRIES


def _count(raw: bytes, message: Descriptor) -> Iterator[None]:
    """Yields after each slice. Raises ServiceError for a part or an entry too many."""
    num_parts = num_entries = 0
    root = message
    parts = [(0, len(raw), message)]
    while parts:
        at, end, message = parts.pop()
        messages = _messages(message)
        try:
            while at < end:
                num_parts += 1
                if num_parts > MAX_PARTS:
                    raise ServiceError(
                        Reason.TOO_EXPENSIVE,
                        f"a message has at most {MAX_PARTS:,} fields, including those of inner messages: send fewer "
                        "items at once",
                    )
                if not num_parts % _SLICE_PARTS:
                    yield
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
                    inner, is_entry = messages.get(tag >> 3, _NO_MESSAGE)
                    if is_entry:
                        num_entries += 1
                        if num_entries > MAX_MAP_ENTRIES:
                            raise _too_many_entries(root, message.fields_by_number[tag >> 3])
                    if inner is not None and value:
                        parts.append((at, min(at + value, end), inner))
                    at += value
        except IndexError:
            return  # it is truncated: the parser stops there too, and reports it


def _too_many_entries(root: Descriptor, field: FieldDescriptor) -> ServiceError:
    assert field.containing_type is not None
    path = _maps_in(root)[field]
    bound = FIELD_BOUNDS.get(field.containing_type.name, {}).get(field.name)  # other contracts' maps have none
    high = bound.high if isinstance(bound, Biases) else MAX_MAP_ENTRIES
    return invalid(path, f"at most {high:,} entries; it has more than {MAX_MAP_ENTRIES:,}", Reason.TOO_EXPENSIVE)


@cache
def _messages(message: Descriptor) -> Mapping[int, tuple[Descriptor, bool]]:
    """Returns the message's fields that are messages, and whether each is an entry of a map."""
    return {
        field.number: (field.message_type, field.message_type.GetOptions().map_entry)
        for field in message.fields
        if field.message_type is not None
    }


@cache
def _maps_in(root: Descriptor) -> Mapping[FieldDescriptor, str]:
    """Returns the maps of a message and its inner messages, with their paths in errors: without ``start``, the only
    field of a request."""
    found: dict[FieldDescriptor, str] = {}
    seen = {root}
    paths = [(root, "")]
    while paths:
        message, path = paths.pop()
        for field in message.fields:
            if field.message_type is None:
                continue
            place = f"{path}{field.name}"
            if field.message_type.GetOptions().map_entry:
                found[field] = place.removeprefix("start.")
            # A map's values may be messages with maps of their own.
            if field.message_type not in seen:
                seen.add(field.message_type)
                paths.append((field.message_type, f"{place}."))
    return found


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at ``at``, and its end. Raises IndexError if it has no end."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = raw[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise IndexError
