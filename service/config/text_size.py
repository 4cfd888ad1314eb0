"""The limit on a caller's text, and how its size is counted."""

MAX_TEXT_BYTES = 4 << 20
"""Limit on the text of a prompt, and on all messages of a conversation together."""


def utf8_bytes(text: str) -> int:
    """Returns the size of a text in UTF-8. Raises UnicodeEncodeError for half of a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())
