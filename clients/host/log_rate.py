"""Limits how often a message is logged, so that hostile input cannot fill a disk."""

import logging
import threading
import time

BURST = 10
"""The limit of lines per message and period."""
PERIOD_S = 60.0
LOG_KIND = "kind"
"""Key of ``extra`` for one log call that reports different things: each value has a rate of its own. There must be few
values, such as places in the code."""


class LogRate(logging.Filter):
    """Lets ``BURST`` lines of each message pass in ``PERIOD_S``; the next line after that reports how many were left
    out. Messages are distinguished by the line of code that logs them."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self._counts: dict[tuple[str, int, str], tuple[float, int]] = {}
        """When the period began and how many lines came in it, by the line of code and ``LOG_KIND``."""

    def filter(self, record: logging.LogRecord) -> bool:
        now, num_left_out = time.monotonic(), 0
        of = record.pathname, record.lineno, _kind(record)
        with self._counting:
            began, number = self._counts.get(of, (now, 0))
            elapsed_s = now - began
            if elapsed_s > PERIOD_S:
                num_left_out = max(0, number - BURST)
                began, number = now, 0
            self._counts[of] = began, number + 1
        if num_left_out:
            record.msg = f"{record.msg} (and {num_left_out} more like this in the last {elapsed_s:.0f} s)"
        return number < BURST


def _kind(record: logging.LogRecord) -> str:
    """Returns ``LOG_KIND``, or the exception's type: asyncio, for example, logs all exceptions in one line of code."""
    error = record.exc_info[0] if record.exc_info else None
    return str(getattr(record, LOG_KIND, "" if error is None else error.__qualname__))
