"""What can be seen of a worker from outside: how long it has been silent, whether it is stopped, and whether the kernel
killed a process because memory ran out. If /proc or the cgroup files cannot be read, reports nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
STOPPED = "T"
"""The state in /proc/PID/stat of a process that SIGSTOP stopped."""


class Heartbeat:
    """The time since the other process last sent anything. It counts only time in which this process was listening: if
    this process was stopped or kept from its cores, the silence proves nothing."""

    def __init__(self, interval_s: float, now: float) -> None:
        """``length`` must be called every ``interval_s``."""
        self._interval_s = interval_s
        self._received_at = now
        self._checked_at = now

    def received(self, now: float) -> None:
        self._received_at = now

    def length(self, now: float) -> float:
        """Returns the length of the silence, in seconds."""
        deaf = now - self._checked_at - self._interval_s
        if deaf > self._interval_s:
            self._received_at = min(now, self._received_at + deaf)
        self._checked_at = now
        return now - self._received_at


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == [STOPPED]  # the name before it may contain anything


class MemoryKills:
    """Counts the processes that the kernel killed because memory ran out: in the cgroup of this process and its
    workers, and on the machine."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Counts lines ``oom_kill N`` of ``files``, from now on."""
        self._files = files
        self._counts = self._read()

    @classmethod
    def here(cls) -> "MemoryKills":
        """Counts for this process's cgroup and machine."""
        return cls([*_cgroup_files(_read_text(Path("/proc/self/cgroup")), CGROUPS), Path("/proc/vmstat")])

    def have_grown(self) -> bool:
        """Whether there were any since this object was created."""
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
    """Returns the files with the counts of the cgroup that ``membership``, a process's /proc/PID/cgroup, names. In a
    container the cgroup may be at ``root`` itself."""
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
