"""The processes that compile and render chat templates: a launcher, and the renderers that it forks.

A template is an untrusted program. Whatever it does, the kernel ends its renderer at a limit of CPU time or memory, and
the service then sees a closed socket. The launcher itself never reads a template. A renderer cannot open files. This
module imports nothing of gRPC, so that a fork is small and has one thread.
"""

import codecs
import gc
import html  # noqa: F401 - a renderer cannot open files, so modules that jinja2 and Python import late are imported here
import os
import pprint  # noqa: F401
import resource
import signal
import socket
import textwrap  # noqa: F401
import time
import unicodedata  # noqa: F401
from contextlib import suppress

import jinja2.constants
import jinja2.debug  # noqa: F401
import msgspec

from penstock.models.executor.child_process import FED_BY_STRANGERS, prepare_child
from penstock.models.executor.priority import lower_priority
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.chat_templates.frames import (
    COMPILE_MEMORY_BYTES,
    COMPILE_S,
    FREE_GROWTH_CHARS,
    LENGTH_BYTES,
    LONG_FRAME_BYTES,
    MAX_GROWTH,
    MEMORY_BYTES,
    MEMORY_PER_BYTE,
    Compiled,
    Ready,
    Render,
    Rendered,
    Setup,
    TemplateFailure,
    encode,
    read_wide,
)
from penstock.service.chat_templates.rendering import CompiledTemplate, RenderError, TemplateSyntaxError
from penstock.service.chat_templates.text import marks_of

_GREETING = TemplateInput([TemplateMessage("user", "hi")])
_CODECS = ("ascii", "latin_1", "raw_unicode_escape", "unicode_escape", "utf_8", "utf_16", "utf_32", "cp1252")

# The launcher --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Forks a renderer for each socket that arrives on standard input, until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Terminals and service managers send these to all processes; the service decides when this one ends.
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps renderers
    time.localtime()  # reads the time zone, for ``strftime_now``
    for name in _CODECS:
        codecs.lookup(name)
    prepare_child(FED_BY_STRANGERS)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, (*descriptors,), _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            for descriptor in descriptors:
                _fork(descriptor, control)


def _fork(descriptor: int, control: socket.socket) -> None:
    try:
        child = os.fork()
    except OSError:  # the service sees that its socket is closed
        child = -1
    if child:
        os.close(descriptor)
        return
    try:
        control.close()
        os.close(0)
        with socket.socket(fileno=descriptor) as connection:
            _Renderer(connection).run()
    finally:
        os._exit(1)  # the launcher's code must not run here


# A renderer ----------------------------------------------------------------------------------------------------------


class _Renderer:
    """One process that renders with a model's templates, until its socket is closed or a limit ends it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._base_bytes = self._address_space()
        self._templates: dict[str, CompiledTemplate] = {}

    def run(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        setup = msgspec.msgpack.decode(self._read(), type=Setup)
        self._limit(COMPILE_S, COMPILE_MEMORY_BYTES)
        ready = self._compile(setup)
        self._answer(ready)
        if ready.problem:
            return
        gc.collect()
        gc.freeze()
        self._base_bytes = self._address_space()
        decoder = msgspec.msgpack.Decoder(Render, ext_hook=read_wide)
        while True:
            frame = self._read()
            self._limit(setup.timeout_s, MEMORY_BYTES + MEMORY_PER_BYTE * len(frame))
            try:
                rendered = self._render(decoder.decode(frame), MAX_GROWTH * len(frame) + FREE_GROWTH_CHARS)
                self._answer(rendered)
            except MemoryError:
                return
            if len(frame) > LONG_FRAME_BYTES:
                return

    def _limit(self, cpu_s: float, num_bytes: int) -> None:
        """Limits the CPU time and the memory of the next task. The signal ends the process."""
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = self._base_bytes + num_bytes
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)

    def _compile(self, setup: Setup) -> Ready:
        for name, source in setup.sources.items():
            try:
                self._templates[name] = CompiledTemplate(source, setup.special_tokens)
            except TemplateSyntaxError as error:
                return Ready({}, name, str(error))
            with suppress(RenderError):  # it may refuse a greeting, but it must end
                self._templates[name].render(_GREETING)
        return Ready(
            {name: Compiled(template.shows_tools, template.roles) for name, template in self._templates.items()}
        )

    def _render(self, wanted: Render, max_chars: int) -> Rendered:
        template = self._templates[wanted.name]
        try:
            text = template.render_after_answer(wanted.chat) if wanted.after_answer else template.render(wanted.chat)
        except RenderError as error:
            return Rendered(failure=error.failure, problem=str(error))
        if len(text) > max_chars:
            problem = (
                f"the model's chat template makes {len(text):,} characters of it; at most {max_chars:,} are allowed: "
                "shorten the conversation"
            )
            return Rendered(failure=TemplateFailure.REFUSED, problem=problem)
        return Rendered(str.__str__(text), marks_of(text))

    def _read(self) -> bytes:
        """Returns the next frame. Ends the process if the socket is closed."""
        length = int.from_bytes(self._read_exactly(LENGTH_BYTES), "little")
        if length > LONG_FRAME_BYTES:  # the renderer ends after it
            lower_priority()
        return self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        read = bytearray()
        while len(read) < length:
            part = self._connection.recv(min(length - len(read), 1 << 20))
            if not part:
                os._exit(0)
            read += part
        return bytes(read)

    def _answer(self, answer: Ready | Rendered) -> None:
        try:
            content = encode(answer)
        except UnicodeEncodeError:  # half of a surrogate pair, which a template may write as an escape
            problem = "the model's chat template renders invalid text"
            content = encode(Rendered(failure=TemplateFailure.REFUSED, problem=problem))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._connection.sendall(len(content).to_bytes(LENGTH_BYTES, "little") + content)

    def _address_space(self) -> int:
        return int(os.pread(self._statm, 100, 0).split()[0]) * resource.getpagesize()
