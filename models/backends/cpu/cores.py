"""Chooses the cores that the compute threads are pinned to."""

import os
from collections import Counter
from pathlib import Path

from penstock.models.errors import ModelError

PINNINGS = ("auto", "on", "off")
"""Values of --cpu-pinning."""


def choose_cores(pinning: str, num_threads: int, root: Path = Path("/")) -> list[int] | None:
    """Returns a core for each thread; None lets the system move them freely. ``root`` is where /sys is.

    ``auto`` pins if this process was given cores of its own, fewer than the machine has, and its threads use all of
    them. Otherwise a second service would choose the same cores, and the two would share them while others are idle.
    Raises ModelError.
    """
    if pinning not in PINNINGS:
        raise ModelError(f"--cpu-pinning {pinning}: must be one of {', '.join(PINNINGS)}")
    allowed = os.sched_getaffinity(0)
    if pinning == "on" and num_threads > len(allowed):
        raise ModelError(
            f"--cpu-pinning on: {num_threads} threads cannot have a core each of the {len(allowed)} that this process "
            f"may use: give --threads {len(allowed)} or fewer, or leave the flag out"
        )
    has_its_own = num_threads == len(allowed) < (os.cpu_count() or 1)
    if pinning == "on" or (pinning == "auto" and has_its_own):
        return _apart(allowed, root)[:num_threads]
    return None


def _apart(cores: set[int], root: Path) -> list[int]:
    """Sorts hardware threads by number, but puts each core's second thread after the first threads of all cores."""
    before: Counter[str] = Counter()
    ranks = {}
    for core in sorted(cores):
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        ranks[core] = before[siblings]
        before[siblings] += 1
    return sorted(ranks, key=lambda core: (ranks[core], core))
