"""Converts protobuf messages to plain data for JSON, every field by its name; and durations to seconds and back."""

from collections.abc import Sequence
from typing import Any

from google.protobuf import duration
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def as_dict(message: Any) -> dict[str, Any]:
    """Converts a message. Absent fields are None; enums are lower-case names without their common prefix; durations are
    seconds; times are RFC 3339."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def seconds_of(value: Duration) -> float:
    """Returns a Duration in seconds."""
    return value.ToNanoseconds() / 1e9


def duration_of(seconds: float) -> Duration:
    """Returns seconds as a Duration, to the microsecond. Raises ValueError beyond 10,000 years."""
    return duration.from_microseconds(round(seconds * 1e6))


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value, field)


def _plain(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, Duration):
        return seconds_of(value)
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if field.message_type is not None:
        return as_dict(value)
    if field.enum_type is not None:
        prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name.removeprefix(prefix).lower()
    return value
