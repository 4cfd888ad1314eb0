"""Runs a part in a process of its own, with a time limit. What it allocates, breaks or leaves running ends with it."""

import json
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

Send = Callable[[dict[str, Any]], None]


class Failed(Exception):
    """A part ended too early. The lines that it sent before that count."""


def run_apart(work: Callable[[Send], None], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the lines that ``work`` sends, when it sends them. Raises Failed if it fails or takes longer.

    The process is a copy of this one, so modules are imported only once. This process must not have used the device.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        # Of threads that libraries keep for work to come.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(work, writer)
    os.close(writer)
    ended = False
    try:
        yield from _lines(reader, time.monotonic() + seconds)
        ended = True
    except TimeoutError:
        raise Failed(f"took more than its {seconds:.0f} s") from None
    finally:
        os.close(reader)
        if not ended:
            _kill(child)
        _, status = os.waitpid(child, 0)
        _kill(child)  # what it started and left running
    if code := os.waitstatus_to_exitcode(status):
        raise Failed(f"ended with status {code}; its error is above")


def _be_child(work: Callable[[Send], None], writer: int) -> None:
    """Never returns."""
    os.setsid()
    status = 1
    try:
        with os.fdopen(writer, "w") as pipe:

            def send(line: dict[str, Any]) -> None:
                pipe.write(json.dumps(line) + "\n")
                pipe.flush()

            work(send)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _lines(reader: int, end: float) -> Iterator[dict[str, Any]]:
    """Until the other end is closed. Raises TimeoutError."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, end - time.monotonic())):
                raise TimeoutError
            if not (data := os.read(reader, 1 << 16)):
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from map(json.loads, lines)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
