"""Measures how fast this machine reads memory: the best of several access patterns.

One pattern is not enough: which one is fastest depends on the processor's own prefetchers, and a pattern that is slower
than a kernel's makes the kernel seem to beat the floor.
"""

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STREAMS = (1, 4, 8)
AHEAD_BYTES = (0, 1024, 4096)
"""Distances of the prefetch; 0: none."""
SHORTLIST = 4
"""Patterns that are measured for longer, after a short look at all."""
LOOK_S, LONGER_S = 0.1, 0.8


@dataclass(frozen=True)
class Pattern:
    """A way to read memory."""

    threads: int
    streams: int
    """In each thread."""
    ahead_bytes: int
    is_huge: bool
    """Whether the memory has huge pages, if the system gives them."""

    def __str__(self) -> str:
        ahead = f"prefetch of {self.ahead_bytes} bytes" if self.ahead_bytes else "no prefetch"
        pages = "huge pages" if self.is_huge else "small pages"
        return f"{self.threads} threads, {self.streams} streams each, {ahead}, {pages}"


def patterns(threads: int, *, is_huge: bool) -> list[Pattern]:
    """Returns all patterns with one kind of page, for 1 to ``threads`` threads (doubled from step to step)."""
    counts = {threads, *(1 << power for power in range(threads.bit_length()) if 1 << power <= threads)}
    return [
        Pattern(count, streams, ahead, is_huge)
        for count, streams, ahead in itertools.product(sorted(counts), STREAMS, AHEAD_BYTES)
    ]


def best_reading(num_bytes: int, threads: int) -> tuple[float, Pattern] | None:
    """Returns the most bytes per second at which ``num_bytes`` are read, and the pattern. None without a compiler."""
    library = _library()
    if library is None:
        return None
    found: list[tuple[float, Pattern]] = []
    for is_huge in (False, True):
        with _memory(library, num_bytes, is_huge) as data:

            def rate(pattern: Pattern, seconds: float, data: int = data) -> float:
                took_s: float = library.fastest_pass(
                    data, num_bytes, pattern.threads, pattern.streams, pattern.ahead_bytes, seconds
                )
                return num_bytes / took_s

            looks = [(rate(pattern, LOOK_S), pattern) for pattern in patterns(threads, is_huge=is_huge)]
            looks.sort(key=lambda look: -look[0])
            found += looks[:1]
            found += [(rate(pattern, LONGER_S), pattern) for _, pattern in looks[:SHORTLIST]]
    return max(found, key=lambda each: each[0])


@contextmanager
def _memory(library: ctypes.CDLL, num_bytes: int, is_huge: bool) -> Iterator[int]:
    data = library.allocate(num_bytes, is_huge)
    if not data:
        raise MemoryError(f"no {num_bytes} bytes to read")
    try:
        yield data
    finally:
        library.release(data, num_bytes)


def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("c++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "read.so"
        source = Path(__file__).with_name("read.cpp")
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, "-o", str(out), str(source)], check=True)
        library = ctypes.CDLL(str(out))
    library.allocate.restype, library.allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int]
    library.release.restype, library.release.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t]
    library.fastest_pass.restype = ctypes.c_double
    library.fastest_pass.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_double
    ]  # fmt: skip
    return library
