"""Bounds how often one message is logged, so that strangers' bytes cannot fill a disk."""

import logging
import threading
import time

BURST = 10
"""Lines of a message in each period."""
PERIOD_S = 60.0


class LogRate(logging.Filter):
    """Lets ``BURST`` lines from each place in the program pass in ``PERIOD_S``; the first one after that says how many
    were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}
        """By place: when their period began, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        now = time.monotonic()
        with self._counting:
            began, number = self._counts.get((record.pathname, record.lineno), (now, 0))
            num_left_out, elapsed_s = 0, now - began
            if elapsed_s > PERIOD_S:
                num_left_out = max(0, number - BURST)
                began, number = now, 0
            self._counts[record.pathname, record.lineno] = began, number + 1
        if num_left_out:
            record.msg = f"{record.msg} (and {num_left_out} more like this in the last {elapsed_s:.0f} s)"
        return number < BURST
