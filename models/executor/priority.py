"""Lowers the priority of work that must not take the cores from steps and streams."""

import contextlib
import os
import sys

BACKGROUND_NICE = 10
"""While the layers of a model use every core, such a thread gets a tenth of one."""


def lower_priority(thread_id: int = 0) -> None:
    """Lowers the priority of a thread, by default the calling one, on Linux and if it still runs."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread_id, BACKGROUND_NICE)
