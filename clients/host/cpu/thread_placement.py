"""Decides on which CPUs the compute threads run, and on which NUMA nodes their memory is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.clients.host.cpu.topology import CpuTopology, LogicalCpu

PINNINGS = ("auto", "on", "off")
"""Values of --cpu-pinning."""


class CannotPin(Exception):
    """There are not enough CPUs. The text has the remedy."""


@dataclass(frozen=True)
class ThreadPlacement:
    """The CPUs and nodes of compute threads. The threads of a node are side by side."""

    num_threads: int
    is_pinned: bool
    """Whether each thread stays on a CPU of its own."""
    cpus: tuple[tuple[int, ...], ...] = ()
    """The CPUs of each thread; empty: the system moves threads freely."""
    nodes: tuple[int, ...] = ()
    """The NUMA node of each thread; empty if there is one, or if threads are not kept on theirs."""


def place_threads(topology: CpuTopology, num_threads: int, pinning: str) -> ThreadPlacement:
    """Returns the placement for a value of --cpu-pinning. Raises CannotPin.

    ``auto`` pins if this process was given CPUs of its own, fewer than the machine has, and its threads use all of them
    or one on each core. Otherwise a second service would choose the same CPUs, and the two would share them while
    others are idle. For the same reason threads then are only kept on their NUMA node, if there are several: half of
    what they read would otherwise come from another node.
    """
    if pinning not in PINNINGS:
        raise CannotPin(f"--cpu-pinning {pinning}: must be one of {', '.join(PINNINGS)}")
    usable = len(topology.cpus)
    if pinning == "on" and num_threads > usable:
        raise CannotPin(
            f"--cpu-pinning on: {num_threads} threads cannot have a core each of the {usable} that this process "
            f"may use: give --threads {usable} or fewer, or leave the flag out"
        )
    if pinning == "off" or num_threads > usable:
        return ThreadPlacement(num_threads, is_pinned=False)
    has_its_own = num_threads in (usable, topology.num_cores) and usable < topology.num_online
    is_pinned = pinning == "on" or has_its_own
    chosen = _choose(topology.cpus, num_threads)
    nodes = tuple(cpu.node for cpu in chosen)
    if len(set(nodes)) == 1:
        nodes = ()
    if is_pinned:
        return ThreadPlacement(num_threads, True, tuple((cpu.number,) for cpu in chosen), nodes)
    if not nodes:
        return ThreadPlacement(num_threads, is_pinned=False)
    of_node = {node: tuple(cpu.number for cpu in topology.cpus if cpu.node == node) for node in nodes}
    return ThreadPlacement(num_threads, False, tuple(of_node[node] for node in nodes), nodes)


def _choose(cpus: Sequence[LogicalCpu], num_threads: int) -> list[LogicalCpu]:
    """Returns a CPU for each thread: each core's first hardware thread before any second one, fast cores before
    efficiency cores, and NUMA nodes in turn, so that the memory of all is read. The result is sorted by node."""
    threads_of_core: Counter[int] = Counter()
    cpus_of_node: Counter[tuple[int, bool, int]] = Counter()
    ranks = {}
    for cpu in sorted(cpus, key=lambda cpu: cpu.number):
        sibling = threads_of_core[cpu.core]
        threads_of_core[cpu.core] += 1
        kind = (sibling, cpu.is_efficient, cpu.node)
        ranks[cpu] = (sibling, cpu.is_efficient, cpus_of_node[kind], cpu.node)
        cpus_of_node[kind] += 1
    chosen = sorted(cpus, key=ranks.__getitem__)[:num_threads]
    return sorted(chosen, key=lambda cpu: (cpu.node, cpu.is_efficient, ranks[cpu][0], cpu.number))
