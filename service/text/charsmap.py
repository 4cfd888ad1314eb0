"""SentencePiece's table of replaced characters: a trie of texts (darts-clone), and after it their replacements."""

from array import array

_SIZE_BYTES = _UNIT_BYTES = 4
_IS_VALUE, _HAS_VALUE = 1 << 31, 1 << 8
_BLOCK = 256
"""The units that follow a byte are within one block."""


def check_charsmap(table: bytes) -> None:
    """Checks that every look-up stays inside the table, since the library ends in a panic if one does not. Raises
    ValueError."""
    size = int.from_bytes(table[:_SIZE_BYTES], "little")
    units, texts = table[_SIZE_BYTES : _SIZE_BYTES + size], table[_SIZE_BYTES + size :]
    if not size or size % (_BLOCK * _UNIT_BYTES) or len(units) < size:
        raise ValueError("precompiled_charsmap is damaged: its trie is cut off")
    texts.decode()
    trie = array("I", units)
    values = set()
    for index, unit in enumerate(trie):
        if index and unit & _IS_VALUE:
            continue
        following = index ^ _offset(unit)
        if following >= len(trie):
            raise ValueError("precompiled_charsmap is damaged: its trie leads out of it")
        if unit & _HAS_VALUE:
            values.add(trie[following] & ~_IS_VALUE)
    if any(value >= len(texts) or (texts[value] & 0xC0) == 0x80 for value in values):
        raise ValueError("precompiled_charsmap is damaged: it lacks a replacement")


def longest_replacement(table: bytes) -> int:
    """Returns the length of the longest replacement, in bytes."""
    return max(map(len, table[_SIZE_BYTES + int.from_bytes(table[:_SIZE_BYTES], "little") :].split(b"\0")))


def _offset(unit: int) -> int:
    """Returns the distance from a unit to those of the next byte."""
    return (unit >> 10) << ((unit & (1 << 9)) >> 6)
