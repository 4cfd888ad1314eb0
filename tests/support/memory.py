"""How much memory a process holds, to the byte: what is resident says little, since freed memory stays resident."""

import asyncio
import ctypes
import sys
from collections.abc import Awaitable, Callable

import pytest

_NUM_TRIES = 100
_BLOCK_BYTES = 64
"""More than a small object of Python's takes on average."""


class _MallInfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def held_bytes_counter() -> Callable[[], int]:
    """What counts the bytes that are allocated in this process; skips the test where the C library cannot tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        pytest.skip("needs glibc's mallinfo2")
    mallinfo.restype = _MallInfo

    def held_bytes() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd) + sys.getallocatedblocks() * _BLOCK_BYTES

    return held_bytes


async def grown_bytes(count: Callable[[], Awaitable[int]], before: int, most: int) -> int:
    """Returns ``count()`` minus ``before``, as soon as it is at most ``most`` or after 100 tries. A busy machine frees
    buffers late."""
    for _ in range(_NUM_TRIES):
        if (grown := await count() - before) <= most:
            break
        await asyncio.sleep(0.05)
    return grown
