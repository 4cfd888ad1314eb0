"""The format of log lines: text for people, JSON for programs. The service and its workers use the same one, since all
write to one stderr.

An exception may quote the value that it failed on: a prompt, a token's text, a key. So the service logs where an
exception was raised and its type, and its text only if Python or the system wrote that.
"""

import asyncio
import copy
import json
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

TEXT, JSON = "text", "json"
_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FACTUAL = (AssertionError, AttributeError, ImportError, MemoryError, NameError, OSError, RecursionError)
"""Their texts name code, files or our own numbers, never a value that a client sent."""

_log = logging.getLogger(__name__)

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def set_up_logging(form: str, level: str, *, holds_texts: bool, handler: logging.Handler | None = None) -> None:
    """Logs everything of at least ``level`` in ``form``, TEXT or JSON, through ``handler`` or to stderr. Does nothing
    if logging is set up already. ``holds_texts``: whether the process has clients' texts, which no line may repeat."""
    handler = handler or logging.StreamHandler()
    handler.setFormatter((JsonFormatter if form == JSON else TextFormatter)(holds_texts=holds_texts))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """One line for people; tracebacks follow on their own lines."""

    def __init__(self, *, holds_texts: bool) -> None:
        super().__init__(_FORM)
        self._holds_texts = holds_texts

    def format(self, record: logging.LogRecord) -> str:
        """Formats the exception again even if another formatter has cached its text."""
        if record.exc_info:
            record = copy.copy(record)
            record.exc_text = None
        return super().format(record)

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - logging's name
        """Returns the traceback, and the error's type and text, or only what ``holds_texts`` allows."""
        if not self._holds_texts or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_lines_of(ei[1]))


class JsonFormatter(TextFormatter):
    """One object per line: time, level, logger, message, the record's ``data``, and its exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line in ASCII."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_uncaught(loop: asyncio.AbstractEventLoop) -> None:
    """Logs uncaught errors like others. Python's own messages quote the error and the arguments of calls."""

    def of_the_loop(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Cuts off the arguments of a call, or the object's description.
        message = str(context.get("message", "")).partition("(")[0].splitlines()[:1]
        _log.error("the event loop: %s", *message or ["an error"], exc_info=context.get("exception"))

    loop.set_exception_handler(of_the_loop)
    threading.excepthook = lambda it: _log.error("a thread ended with an error", exc_info=it.exc_value)
    sys.unraisablehook = lambda it: _log.error("an exception could not be raised", exc_info=it.exc_value)


def _lines_of(error: BaseException) -> Iterator[str]:
    """Yields the lines of an error and of its causes, the first cause first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    for number, link in enumerate(reversed(chain)):
        yield "While handling it:" if number else "Traceback (most recent call last):"
        yield from (line.rstrip("\n") for line in traceback.format_tb(link.__traceback__))
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        yield f"{name}: {link}" if isinstance(link, _FACTUAL) else name
