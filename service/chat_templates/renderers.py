"""The service's side of the processes that render chat templates: starts them, uses them, and replaces those that end.

Independent of Jinja. For the limits on a renderer see ``process``.
"""

import atexit
import functools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TypeVar

import msgspec

from penstock.models.executor.child_process import child_environment
from penstock.service.chat_templates.chat_message import TemplateInput
from penstock.service.chat_templates.frames import (
    COMPILE_MEMORY_BYTES,
    COMPILE_S,
    FREE_GROWTH_CHARS,
    LENGTH_BYTES,
    LONG_FRAME_BYTES,
    MAX_GROWTH,
    Ready,
    Render,
    Rendered,
    Setup,
    encode,
)
from penstock.service.thread_pool import giving_way

DEFAULT_TIMEOUT_S = 2.0
"""CPU time for rendering a conversation: 4 MiB in the most elaborate templates take a third of it."""
_LAUNCHER = "from penstock.service.chat_templates.process import main; main()"
_PATIENCE_S = 0.005
"""Rendering that takes longer gives up its turn in the thread pool meanwhile."""
_WALL_FACTOR, _WALL_S = 4.0, 5.0
"""Limit on the time of a response on a busy machine: this many times its CPU time, plus this."""
_START_WALL_S = 120.0
"""The same as ``_WALL_S`` when the service starts: no caller waits yet, and a busy machine must not end the service."""
_MAX_IDLE = 4
"""Limit on idle renderers that are kept."""
_BYTES_PER_CHAR = 5
"""Bytes of a response per character, with its mark."""

_Answer = TypeVar("_Answer", Ready, Rendered)


class TemplateLimit(Exception):
    """A template exceeded a limit, or its process died. The text gives the reason and the remedy."""


class TemplateBusy(Exception):
    """A renderer got too little CPU time from the machine; the template may be fine."""


class Renderers:
    """Renders with a model's templates, in one process per thread that renders. Threads may share it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], timeout_s: float) -> None:
        """Compiles the templates. Raises TemplateLimit and TemplateBusy; ``ready`` has any other problem."""
        self._setup = Setup(sources, special_tokens, timeout_s)
        self._setup_frame = encode(self._setup)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._idle)
        connection, self.ready = self._start(_START_WALL_S)
        self._idle.append(connection)

    def render(self, name: str, chat: TemplateInput, after_answer: bool = False) -> Rendered:
        """Renders a conversation. Raises TemplateLimit and TemplateBusy."""
        frame = encode(Render(name, chat, after_answer))
        most = _BYTES_PER_CHAR * (MAX_GROWTH * len(frame) + FREE_GROWTH_CHARS) + 1024
        began = time.monotonic()
        for is_new in (False, True):  # something else may have ended the first renderer, such as an operator
            with ExitStack() as stack:
                connection = stack.enter_context(self._take(is_new))
                try:
                    answer = _exchange(connection, frame, self._setup.timeout_s, most, Rendered)
                except _Ended:
                    if time.monotonic() - began >= self._setup.timeout_s:
                        break
                    continue
                if len(answer.marks) != len(answer.text):
                    break
                if len(frame) <= LONG_FRAME_BYTES:  # otherwise the renderer ends
                    stack.pop_all()
                    self._give_back(connection)
                return answer
        raise TemplateLimit(
            f"takes more than {self._setup.timeout_s:g} s of processor time, or too much memory, for "
            "it: shorten the conversation"
        )

    def _take(self, is_new: bool) -> socket.socket:
        with self._lock:
            if self._idle and not is_new:
                return self._idle.pop()
        connection, _ = self._start()
        return connection

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _start(self, wall_s: float = _WALL_S) -> tuple[socket.socket, Ready]:
        began = time.monotonic()
        for _ in range(2):
            with ExitStack() as stack, suppress(_Ended):
                connection = stack.enter_context(_launcher().connect())
                most = 2 * len(self._setup_frame) + 4096
                ready = _exchange(connection, self._setup_frame, COMPILE_S, most, Ready, wall_s)
                stack.pop_all()
                return connection, ready
            if time.monotonic() - began >= COMPILE_S:
                break
        raise TemplateLimit(
            f"takes more than {COMPILE_S:g} s of processor time or {COMPILE_MEMORY_BYTES >> 20} MiB to compile, or to "
            "render a greeting"
        )


class _Ended(Exception):
    """A renderer ended before it responded."""


def _exchange(
    connection: socket.socket, content: bytes, cpu_s: float, most: int, kind: type[_Answer], wall_s: float = _WALL_S
) -> _Answer:
    """Sends a frame, and returns the response, of at most ``most`` bytes. Raises _Ended and TemplateBusy."""
    deadline = time.monotonic() + wall_s + _WALL_FACTOR * cpu_s
    try:
        connection.settimeout(deadline - time.monotonic())
        connection.sendall(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        answer = bytearray(_first_part(connection, deadline))
        length = LENGTH_BYTES + int.from_bytes(answer[:LENGTH_BYTES], "little")
        while answer and len(answer) < length <= most:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(min(length - len(answer), 1 << 20))
            if not part:
                break
            answer += part
        if len(answer) != length or length > most:
            raise _Ended
        return msgspec.msgpack.decode(memoryview(answer)[LENGTH_BYTES:], type=kind)
    except TimeoutError:
        raise TemplateBusy from None
    except (OSError, ValueError):  # closed, or not a renderer's response
        raise _Ended from None


def _first_part(connection: socket.socket, deadline: float) -> bytes:
    connection.settimeout(_PATIENCE_S)
    with suppress(TimeoutError):
        return connection.recv(1 << 16)
    with giving_way():
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        return connection.recv(1 << 16)


def _close_all(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


class _Launcher:
    """The process that forks renderers. It ends when this process does."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def connect(self) -> socket.socket:
        """Returns the service's end of a new renderer's socket. Raises OSError if no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), [b"r"], [theirs.fileno()])
            except OSError:
                self.end()
                socket.send_fds(self._running(), [b"r"], [theirs.fileno()])
        return ours

    def _running(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.end()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _LAUNCHER],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=child_environment(os.environ),
            )
        return self._control

    def end(self) -> None:
        """Ends the process; the next ``connect`` starts another."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._control = self._process = None


@functools.cache
def _launcher() -> _Launcher:
    """Returns the process's only launcher: it costs 0.2 s and 15 MiB, and a renderer next to nothing."""
    launcher = _Launcher()
    atexit.register(launcher.end)
    return launcher
