"""Ways to break a message's bytes."""

import random
import struct
from collections.abc import Callable


def flip(rng: random.Random, raw: bytes) -> bytes:
    """Some bits."""
    broken = bytearray(raw or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def cut(rng: random.Random, raw: bytes) -> bytes:
    """At any place."""
    return raw[: rng.randrange(len(raw) + 1)]


def insert(rng: random.Random, raw: bytes) -> bytes:
    """Bytes that are no part of it, often a number that never ends."""
    at = rng.randrange(len(raw) + 1)
    foreign = rng.choice(
        (rng.randbytes(rng.randrange(1, 9)), b"\xff" * 11, b"\x80" * 9 + b"\x01", b"\xed\xa0\x80", b"\0")
    )
    return raw[:at] + foreign + raw[at:]


def double(rng: random.Random, raw: bytes) -> bytes:
    """A part of it again, elsewhere."""
    start, stop = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + raw[start:stop] + raw[at:]


def retag(rng: random.Random, raw: bytes) -> bytes:
    """A field in front, of any number and wire type."""
    tag = (rng.choice((1, 2, 3, 4, 5, 6, 7, 15, 16, 100)) << 3) | rng.randrange(8)
    content = rng.choice(
        (b"", b"\x01", b"\xff\xff\xff\xff\x0f", struct.pack("<d", float("nan")), b"\x02\xff\xfe", b"\x7f")
    )
    encoded = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return encoded + content + raw


def nest(rng: random.Random, raw: bytes) -> bytes:
    """In itself, many times."""
    for _ in range(rng.choice((1, 3, 120))):
        if len(raw) > 2000:
            break
        length = bytes([len(raw)]) if len(raw) < 128 else bytes([len(raw) & 127 | 128, len(raw) >> 7])
        raw = bytes([rng.randrange(1, 8) << 3 | 2]) + length + raw
    return raw


def noise(rng: random.Random, raw: bytes) -> bytes:
    """Nothing of it."""
    return rng.randbytes(rng.choice((0, 1, 5, 100)))


BREAK: tuple[Callable[[random.Random, bytes], bytes], ...] = (flip, flip, cut, insert, double, retag, nest, noise)
