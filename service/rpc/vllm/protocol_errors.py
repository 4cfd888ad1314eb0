"""Statuses that the contract itself defines, and that are therefore not in the service's catalogue."""

import grpc
from google.rpc import status_pb2

from penstock.service.errors import StatusError


def protocol_error(code: grpc.StatusCode, message: str) -> StatusError:
    """Returns the error that ends a call with a code. ``message`` names the field or method, and the remedy."""
    number: int = code.value[0]
    return StatusError(status_pb2.Status(code=number, message=message))
