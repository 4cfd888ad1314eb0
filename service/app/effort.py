"""Measures whether another process gets the processor time that it needs."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STARVED = 0.5
"""A process that is ready to run and gets less than this share of a core is slowed by others."""


class Effort:
    """Checks a process from time to time."""

    def __init__(self, pid: int) -> None:
        self._path = Path("/proc") / str(pid) / "stat"
        self._used_s = self._read()[1]

    def is_starved(self, elapsed_s: float) -> bool:
        """Returns whether the process is ready to run but got little processor time since the last check,
        ``elapsed_s`` ago. A process that sleeps, is stopped or has ended is not ready."""
        wants, used_s = self._read()
        got_s, self._used_s = used_s - self._used_s, used_s
        return wants and got_s < _STARVED * elapsed_s

    def _read(self) -> tuple[bool, float]:
        """Returns whether the process is ready to run, and its processor time in seconds."""
        try:
            fields = self._path.read_text().rpartition(")")[2].split()
        except OSError:
            return False, 0.0
        return fields[0] == "R", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
