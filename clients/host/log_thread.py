"""Writes the log to stderr. Independent of the log's content."""

import contextlib
import logging
import os
import queue
import threading

MAX_WAITING = 4096
"""The limit of queued lines; further ones are dropped."""
_FLUSH_S = 2.0

_log = logging.getLogger(__name__)


class LogThread(logging.Handler):
    """Writes to stderr from a separate thread, so that an unread pipe or a slow disk does not block the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue(MAX_WAITING)
        self._num_dropped = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line; never waits."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._counting:
                self._num_dropped += 1

    def flush(self) -> None:
        """Waits until all is written, but not for long; called when the process ends."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FLUSH_S)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            data = f"{line}\n{self._dropped()}".encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # stderr is closed
                while data:  # not with sys.stderr: its flush at exit would wait for the lock
                    data = data[os.write(2, data) :]
            self._lines.task_done()

    def _dropped(self) -> str:
        with self._counting:
            number, self._num_dropped = self._num_dropped, 0
        if not number:
            return ""
        message = "%d lines of the log were dropped: stderr was not read as fast as they came"
        return f"{self.format(_log.makeRecord(_log.name, logging.WARNING, __file__, 0, message, (number,), None))}\n"
