"""Converts a protobuf message to plain data for JSON: every field by its name, numbers as numbers."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor


def as_dict(message: Any) -> dict[str, Any]:
    """Converts a message. Absent fields are None; enums are lower-case names without their common prefix."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain(value, field)


def _plain(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return as_dict(value)
    if field.enum_type is not None:
        prefix = field.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name.removeprefix(prefix).lower()
    return value
