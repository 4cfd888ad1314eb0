"""Limits how often a message is logged, so that hostile input cannot fill a disk."""

import logging
import threading
import time

BURST = 10
"""Lines of a message in each period."""
PERIOD_S = 60.0


class LogRate(logging.Filter):
    """Lets ``BURST`` lines of each message pass in ``PERIOD_S``; the next line after that says how many were left out.
    Messages are told apart by the place in the program that logs them."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}
        """For each place that logs: when its period began, and how many lines came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        now, num_left_out = time.monotonic(), 0
        with self._counting:
            began, number = self._counts.get((record.pathname, record.lineno), (now, 0))
            elapsed_s = now - began
            if elapsed_s > PERIOD_S:
                num_left_out = max(0, number - BURST)
                began, number = now, 0
            self._counts[record.pathname, record.lineno] = began, number + 1
        if num_left_out:
            record.msg = f"{record.msg} (and {num_left_out} more like this in the last {elapsed_s:.0f} s)"
        return number < BURST
