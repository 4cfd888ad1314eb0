"""Finds the control groups that a process is in, and reads their CPU quota. ``root`` is where /proc and /sys are."""

import math
import re
from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str = "") -> Iterator[Path]:
    """Yields the process's control group and its parents: each may have limits. Version 2; version 1 if a controller is
    named, which has its own tree there, possibly shared with others."""
    own = re.search(rf"^\d+:((?:\S+,)?{controller}(?:,\S+)?):/(.*)$", read(root / "proc/self/cgroup"), re.MULTILINE)
    top = root / "sys/fs/cgroup"
    if controller:
        top /= own[1] if own and (top / own[1]).exists() else controller
    group = top / (own[2] if own else "")
    yield group
    while group != top:
        group = group.parent
        yield group


def cpu_quota(root: Path) -> float:
    """Returns the CPU time that the control groups allow, in CPUs; infinity without a limit."""
    quotas = [math.inf]
    for group in control_groups(root):
        quota, _, period = read(group / "cpu.max").partition(" ")
        quotas.append(_share(quota, period))
    for group in control_groups(root, "cpu"):
        quota, period = (read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quotas.append(_share(quota, period))
    return min(quotas)


def read(path: Path) -> str:
    """Returns the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _share(quota: str, period: str) -> float:
    """Returns a quota in CPUs; a group without a limit has ``max``, or -1, or no file."""
    quota, period = quota.strip(), period.strip()
    limited = quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0
    return int(quota) / int(period) if limited else math.inf
