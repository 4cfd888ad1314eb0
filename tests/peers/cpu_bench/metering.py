"""What an engine's processes take, and what others take meanwhile, by /proc and psutil."""

import os
import threading

import psutil

SAMPLE_EVERY_S = 0.25


class MemoryMeter:
    """The peak of the resident memory of a process and its descendants, from ``start`` to ``stop``."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes = 0
        """Shared pages count in every process that has them."""

    def __enter__(self) -> "MemoryMeter":
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def proportional_bytes(self) -> int:
        """Now, each shared page divided among those that have it: reading it takes the kernel long, so it is read once,
        when the engine has all its memory."""
        total = 0
        for process in self._processes():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                pass
        return total

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        total = 0
        for process in self._processes():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                pass
        self.peak_bytes = max(self.peak_bytes, total)

    def _processes(self) -> list[psutil.Process]:
        return _tree(self._root)


class ForeignLoad:
    """CPU seconds that the machine spends from here on for others than this process and its descendants."""

    def __init__(self) -> None:
        self._machine = _machine_seconds()
        self._ours = _tree_seconds()

    def seconds(self) -> float:
        """So far. Processes of ours that began and ended meanwhile count as others."""
        return max(0.0, (_machine_seconds() - self._machine) - (_tree_seconds() - self._ours))


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _tree_seconds() -> float:
    total = 0.0
    for process in _tree(psutil.Process()):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _machine_seconds() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        fields = [int(text) for text in file.readline().split()[1:9]]
    idle, waiting = fields[3], fields[4]
    return (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")
