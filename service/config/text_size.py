"""How much text a caller may send, and how a text's size is counted."""

MAX_TEXT_BYTES = 4 << 20
"""Of a prompt, and of all messages of a conversation together."""


def utf8_bytes(text: str) -> int:
    """What a text takes in UTF-8. Raises UnicodeEncodeError for half of a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())
