"""Statuses in another engine's contract: those that the contract itself defines, and the service's own with the
contract's names of fields."""

from collections.abc import Mapping

import grpc
from google.protobuf import any as pb_any
from google.rpc import error_details_pb2, status_pb2

from penstock.service.errors import StatusError


def protocol_error(code: grpc.StatusCode, message: str) -> StatusError:
    """Returns the error that ends a call with a code that is not in the service's catalogue. ``message`` names the
    field or method, and the remedy."""
    number: int = code.value[0]
    return StatusError(status_pb2.Status(code=number, message=message))


def renamed_status(status: status_pb2.Status, names: Mapping[str, str]) -> status_pb2.Status:
    """Returns the status of a request, with the contract's name for the field that is wrong, if one is. ``names`` has
    the contract's names by those of penstock.v1; fields inside a renamed one keep their names."""
    renamed = status_pb2.Status(code=status.code, message=status.message)
    for detail in status.details:
        problem = error_details_pb2.BadRequest()
        if detail.Unpack(problem):
            for violation in problem.field_violations:
                name = _foreign_name(violation.field, names)
                renamed.message = _with_name(renamed.message, violation.field, name)
                violation.description = _with_name(violation.description, violation.field, name)
                violation.field = name
            detail = pb_any.pack(problem)
        renamed.details.append(detail)
    return renamed


def _foreign_name(field: str, names: Mapping[str, str]) -> str:
    """Returns the contract's name for the longest part of a field's path that has one, with the rest of the path."""
    for name in sorted(names, key=len, reverse=True):
        if field.startswith(name) and field[len(name) : len(name) + 1] in ("", ".", "["):
            return names[name] + field.removeprefix(name)
    return field


def _with_name(text: str, field: str, name: str) -> str:
    return name + text.removeprefix(field) if text.startswith(f"{field}:") else text
