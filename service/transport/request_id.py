"""Names for requests: 26 characters that sort by the time they were made."""

import secrets
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32: no letter that is mistaken for a digit."""


def new_request_id() -> str:
    """A ULID: 48 bits of milliseconds since 1970, then 80 random bits; nobody can guess another's."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join([_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5)])
