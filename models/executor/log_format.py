"""The form of the log's lines: text for people, JSON for programs. The service's and its worker's are alike, since both
write to one stderr.

An exception may quote what it failed on: a prompt, a token's text, a key. So the service tells of one where it came
from and its type, and its text only where Python or the system wrote that. Knows nobody who logs.
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
"""Their texts name code, files or our own numbers, never a value that somebody sent."""

_log = logging.getLogger(__name__)

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def set_up_logging(form: str, level: str, *, holds_texts: bool, handler: logging.Handler | None = None) -> None:
    """Has everything of at least ``level`` logged as ``form``, one of TEXT and JSON, by ``handler`` or to stderr;
    nothing, where logging is set up already. ``holds_texts``: whether the process has callers' texts, which no line may
    repeat."""
    handler = handler or logging.StreamHandler()
    handler.setFormatter((JsonFormatter if form == JSON else TextFormatter)(holds_texts=holds_texts))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """A line for people; tracebacks follow on their own lines."""

    def __init__(self, *, holds_texts: bool) -> None:
        super().__init__(_FORM)
        self._holds_texts = holds_texts

    def format(self, record: logging.LogRecord) -> str:
        """The record's exception is told by this formatter, whoever else has told it before."""
        if record.exc_info:
            record = copy.copy(record)
            record.exc_text = None
        return super().format(record)

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - logging's name
        """Where it came from, and what it was."""
        if not self._holds_texts or ei[1] is None:
            return super().formatException(ei)
        return "\n".join(_told(ei[1]))


class JsonFormatter(TextFormatter):
    """An object a line: time, level, logger, message, whatever the record has in ``data``, and its exception."""

    def format(self, record: logging.LogRecord) -> str:
        """In one line, in ASCII."""
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
    """Has errors that nobody catches logged as others are: of the event loop, of threads, and of what is collected.
    Python's own words for them quote the error, and arguments of calls."""

    def of_the_loop(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Up to the arguments of a call, or the object's description.
        message = str(context.get("message", "")).partition("(")[0].splitlines()[:1]
        _log.error("the event loop: %s", *message or ["an error"], exc_info=context.get("exception"))

    def of_a_thread(arguments: threading.ExceptHookArgs) -> None:
        _log.error("a thread ended by an error", exc_info=arguments.exc_value)

    def of_nobody(arguments: Any) -> None:
        _log.error("an error that nobody could be told of", exc_info=arguments.exc_value)

    loop.set_exception_handler(of_the_loop)
    threading.excepthook = of_a_thread
    sys.unraisablehook = of_nobody


def _told(error: BaseException) -> Iterator[str]:
    """The error and those before it, the first one first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    for number, link in enumerate(reversed(chain)):
        yield "Then, while that was handled:" if number else "Traceback (most recent call last):"
        yield from (line.rstrip("\n") for line in traceback.format_tb(link.__traceback__))
        kind = type(link)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        yield f"{name}: {link}" if isinstance(link, _FACTUAL) else name
