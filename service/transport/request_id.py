"""Request ids: 26 characters that sort by creation time."""

import secrets
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32, without letters that look like digits."""


def new_request_id() -> str:
    """Returns a ULID: 48 bits of milliseconds since 1970, then 80 random bits, so that ids cannot be guessed."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join([_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5)])
