"""Reads which logical CPUs a process may use, and how they share cores and memory: from /sys/devices/system, the
affinity mask and the control groups. Files that make no sense count as absent. Without any, each logical CPU is a core
of its own on the only NUMA node."""

import math
import os
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from penstock.clients.host.cpu.control_groups import cpu_quota, read

EFFICIENCY_BELOW = 0.85
"""A core with less than this part of the fastest core's capacity is an efficiency core. Fast cores of one processor
differ by a few percent."""
_MOST_CPUS = 1 << 16


@dataclass(frozen=True)
class LogicalCpu:
    """A hardware thread, by the number that the system gives it."""

    number: int
    core: int
    """The lowest number among the hardware threads of its core."""
    node: int
    """The NUMA node with the memory that is nearest."""
    is_efficient: bool
    """Whether it is an efficiency core of a processor with two kinds."""


@dataclass(frozen=True)
class CpuTopology:
    """What a process may use."""

    cpus: tuple[LogicalCpu, ...]
    """The logical CPUs that its affinity mask allows, by number."""
    num_online: int
    """The logical CPUs of the machine."""
    quota: float | None
    """The limit of the control groups on CPU time, in CPUs; None without one."""

    @property
    def num_cores(self) -> int:
        """The number of physical cores with at least one usable CPU."""
        return len({cpu.core for cpu in self.cpus})

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes with at least one usable CPU."""
        return tuple(sorted({cpu.node for cpu in self.cpus}))

    @property
    def num_usable(self) -> float:
        """The usable logical CPUs, or the quota if that is less."""
        return round(min(len(self.cpus), math.inf if self.quota is None else self.quota), 2)

    def num_threads(self) -> int:
        """How many threads can compute without sharing a core or waiting for CPU time: one for each physical core, as
        a core's second hardware thread has the same arithmetic units; and no more than the quota, at least one."""
        return max(1, min(self.num_cores, int(self.num_usable)))


def read_topology(root: Path = Path("/"), allowed: Set[int] | None = None) -> CpuTopology:
    """Reads this machine's; ``root`` is where /proc and /sys are, ``allowed`` the affinity mask, by default this
    process's."""
    if allowed is None:
        has_mask = hasattr(os, "sched_getaffinity")
        allowed = os.sched_getaffinity(0) if has_mask else set(range(os.cpu_count() or 1))
    devices = root / "sys/devices/system"
    numbers = sorted(allowed)
    cores, nodes, slow = _cores(devices, numbers), _nodes(devices), _efficiency_cores(root, numbers)
    cpus = tuple(LogicalCpu(number, cores[number], nodes.get(number, 0), number in slow) for number in numbers)
    online = len(_parse_list(read(devices / "cpu/online"))) or os.cpu_count() or 1
    quota = cpu_quota(root)
    return CpuTopology(cpus, max(online, len(cpus)), None if math.isinf(quota) else quota)


def _cores(devices: Path, numbers: list[int]) -> dict[int, int]:
    """Returns the core of each CPU."""
    cores = {}
    for number in numbers:
        topology = devices / f"cpu/cpu{number}/topology"
        names = ("core_cpus_list", "thread_siblings_list")  # the second is the name before Linux 5.2
        siblings = next(filter(None, (_parse_list(read(topology / name)) for name in names)), set())
        cores[number] = min(siblings) if number in siblings else number
    return cores


def _nodes(devices: Path) -> dict[int, int]:
    """Returns the NUMA node of each CPU. Nodes without CPUs, such as memory on an expansion card, have none."""
    nodes = {}
    for folder in sorted((devices / "node").glob("node[0-9]*")):
        if (number := folder.name.removeprefix("node")).isdecimal():
            nodes.update(dict.fromkeys(_parse_list(read(folder / "cpulist")), int(number)))
    return nodes


def _efficiency_cores(root: Path, numbers: list[int]) -> set[int]:
    """Returns the CPUs on efficiency cores: those that Intel's driver lists, or those of less capacity or frequency."""
    devices = root / "sys/devices"
    listed = _parse_list(read(devices / "cpu_atom/cpus"))
    if listed and _parse_list(read(devices / "cpu_core/cpus")):
        return listed
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        read_numbers = {number: read(devices / f"system/cpu/cpu{number}/{name}").strip() for number in numbers}
        values = {number: int(text) for number, text in read_numbers.items() if text.isdecimal() and int(text) > 0}
        if len(values) == len(numbers):
            fastest = max(values.values(), default=0)
            return {number for number, value in values.items() if value < EFFICIENCY_BELOW * fastest}
    return set()


def _parse_list(text: str) -> set[int]:
    """Returns the numbers in a list such as ``0-3,8,10-11``; none of them if a part of it is not of this form."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        if match is None:
            return set()
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_CPUS:
            return set()
        found.update(range(first, last + 1))
    return found
