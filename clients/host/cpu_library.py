"""What the CPU library says of this machine.

It is asked in a process of its own: one that cannot be loaded, or dies of an instruction, is a finding and no more.
"""

import signal
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuLibrary:
    """The compiled kernels for a CPU."""

    levels: list[str]
    """The instruction sets that it runs with here, the best first, which is what it will use; none: it is of no use."""
    problem: str
    """Why it is of no use; empty if it is."""
    remedy: str


def inspect_cpu_library() -> CpuLibrary:
    """Has the installed library tell."""
    command = [sys.executable, "-P", "-m", "penstock.kernels.cpu.isa_report"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CpuLibrary([], f"the CPU library could not be asked: {type(error).__name__}", f"run {' '.join(command)}")
    if done.returncode == 0:
        return CpuLibrary(done.stdout.split(), "", "")
    if done.returncode < 0:
        ended = signal.strsignal(-done.returncode)
        return CpuLibrary([], f"the CPU library was ended: {ended}", "install penstock again, on this machine")
    *_, problem, remedy = ["", "", *done.stderr.splitlines()]
    return CpuLibrary([], problem, remedy)
