"""``penstock serve`` as the child process of a replica: its start, its addresses and its end.

The child ends with its parent, for whatever reason: its standard input is a pipe, which then closes. Knows neither Ray
nor the protocols that the child serves.
"""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import IO

_CHILD = (
    "import sys; from penstock.service.app.serve import end_process, serve; "
    "end_process(serve(sys.argv[1:], sys.stdin.fileno()))"
)
"""Names the service as text, like the commands of ``penstock``: the client does not import it."""
_GRPC = re.compile(r"^penstock \S+ serves .* on (\S+)$", re.MULTILINE)
_HTTP = re.compile(r"API at (http://\S+)/v1")
_MAX_LINES, _MAX_LINE = 20, 2000
"""Limits on the part of the child's log that an error contains."""
_PIPE_TIMEOUT_S = 2.0
"""The time for which the pipes of a child that has ended may stay open. Its own children inherit them, and end soon
after it."""
_KILL_TIMEOUT_S = 10.0


class ServeFailed(Exception):
    """``penstock serve`` ended before it served. The text contains the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServeAddresses:
    """The addresses of a running child, for clients on this machine."""

    target: str
    """The gRPC service, as ``host:port``."""
    http: str
    """The HTTP gateway, as a URL without a path."""


class ServeProcess:
    """A child process that serves on free ports of 127.0.0.1. Its methods may be called on any thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Starts the process. ``arguments`` are those of ``penstock serve``, except for its listeners."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, "--port=0", "--http-port=0", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._last_lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._addresses: Future[ServeAddresses] = Future()
        self._ending: Future[str] = Future()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_greeting, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._pass_on_log, args=(self._process.stderr,), daemon=True),
        ]
        for thread in (*self._readers, threading.Thread(target=self._wait_for_end, daemon=True)):
            thread.start()

    async def addresses(self) -> ServeAddresses:
        """Waits until the child serves; returns its addresses. Raises ServeFailed."""
        return await asyncio.shield(asyncio.wrap_future(self._addresses))

    async def wait(self) -> str:
        """Waits until the child has ended; returns how it ended."""
        return await asyncio.shield(asyncio.wrap_future(self._ending))

    def stop(self, timeout_s: float) -> None:
        """Ends the child by SIGTERM, which lets running requests finish, or by SIGKILL after ``timeout_s``. Returns
        when it has ended."""
        self._process.terminate()
        try:
            self._ending.result(timeout_s)
        except TimeoutError:
            self._process.kill()
            with contextlib.suppress(TimeoutError):  # it may hang in a driver
                self._ending.result(_KILL_TIMEOUT_S)

    def _read_greeting(self, output: IO[str]) -> None:
        """Reads the addresses from the text that the child prints when it serves."""
        greeting = ""
        with output:
            for line in output:
                self._pass_on(line)
                greeting += line
                if line.startswith("Ctrl-C stops it."):
                    target, http = _GRPC.search(greeting), _HTTP.search(greeting)
                    assert target is not None, greeting
                    assert http is not None, greeting
                    self._addresses.set_result(ServeAddresses(target[1], http[1]))

    def _pass_on_log(self, log: IO[str]) -> None:
        with log:
            for line in log:
                self._last_lines.append(line[:_MAX_LINE])
                self._pass_on(line)

    @staticmethod
    def _pass_on(line: str) -> None:
        """Writes a line to this process' own log, which Ray collects."""
        with contextlib.suppress(OSError):  # a full disk must not stop the child, whose pipe would be full
            sys.stderr.write(line)

    def _wait_for_end(self) -> None:
        status = self._process.wait()
        for thread in self._readers:
            thread.join(_PIPE_TIMEOUT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = f"status {status}" if status >= 0 else signal.Signals(-status).name
        if not self._addresses.done():
            log = "".join(self._last_lines).strip() or "its log is empty"
            self._addresses.set_exception(ServeFailed(f"penstock serve ended with {ending} before it served:\n{log}"))
        self._ending.set_result(ending)
