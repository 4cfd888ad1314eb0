"""Converts a protobuf message to plain data for JSON: every field by its name, numbers as numbers."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor


def as_dict(message: Any) -> dict[str, Any]:
    """Converts a message. Absent fields are None; enums are named as in ``enum_names``."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def enum_names(enum: EnumDescriptor) -> dict[int, str]:
    """Returns an enum's lower-case names, without their common prefix, by number."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.values}


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
        return enum_names(field.enum_type).get(value, value)
    return value
