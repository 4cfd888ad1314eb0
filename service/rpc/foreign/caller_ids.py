"""The ids of requests in the contracts of other engines."""

from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import invalid

MAX_ID_BYTES = 128
"""Limit on a request's id, as on any client's id."""


def check_caller_id(field: str, request_id: str) -> None:
    """Raises ServiceError for an id that is too long. Adapters check it first, because they keep ids, and errors repeat
    them."""
    if len(request_id) > MAX_ID_BYTES:
        raise invalid(field, f"at most {MAX_ID_BYTES} bytes; it has {utf8_bytes(request_id):,}")
