"""What can be told of a worker from outside: how long it has been silent, whether it was stopped, and whether the
kernel ended a process for want of memory.

Knows no frames. Where /proc or the cgroup files cannot be read, nothing is claimed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
STOPPED = "T"
"""The state of a process that SIGSTOP reached, in /proc/PID/stat."""


class Heartbeat:
    """How long nothing was heard, counting only time in which we were listening: if our own process was stopped, or
    kept from its cores, that says nothing about others."""

    def __init__(self, interval_s: float, now: float) -> None:
        """``length`` will be asked for every ``interval_s``."""
        self._interval_s = interval_s
        self._heard_at = now
        self._asked_at = now

    def heard(self, now: float) -> None:
        """Something was heard."""
        self._heard_at = now

    def length(self, now: float) -> float:
        """In seconds."""
        deaf = now - self._asked_at - self._interval_s
        if deaf > self._interval_s:
            self._heard_at = min(now, self._heard_at + deaf)
        self._asked_at = now
        return now - self._heard_at


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not yet continued."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == [STOPPED]  # the name before it may hold anything


class MemoryKills:
    """How often the kernel ended processes for want of memory: in the cgroup that this process and its workers are in,
    and on the machine."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Lines ``oom_kill N`` of ``files`` are counted, from now on."""
        self._files = files
        self._counts = self._read()

    @classmethod
    def here(cls) -> "MemoryKills":
        """Of this process."""
        return cls([*_cgroup_files(_read_text(Path("/proc/self/cgroup")), CGROUPS), Path("/proc/vmstat")])

    def have_grown(self) -> bool:
        """Whether there were any since this was made."""
        return any(count > self._counts.get(file, count) for file, count in self._read().items())

    def _read(self) -> Mapping[Path, int]:
        counts = {}
        for file in self._files:
            for line in _read_text(file).splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.isdecimal():
                    counts[file] = int(count)
        return counts


def _cgroup_files(membership: str, root: Path) -> list[Path]:
    """Where the counts of the cgroup are that ``membership``, a process's /proc/PID/cgroup, names; in a container the
    cgroup may be at ``root`` itself."""
    files = []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            found = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            found = [root / "memory" / path.lstrip("/") / "memory.oom_control", root / "memory" / "memory.oom_control"]
        else:
            continue
        files += [file for file in found if file.exists()][:1]
    return files


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
