"""Inspects the CPU library on this machine, in a separate process: a library that cannot be loaded, or dies of an
illegal instruction, is only a finding."""

import signal
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuLibrary:
    """The compiled kernels for a CPU."""

    levels: list[str]
    """The instruction sets that it supports here, the one that it uses first. Empty if it cannot be used."""
    problem: str
    """Why it cannot be used; empty if it can."""
    remedy: str


def inspect_cpu_library() -> CpuLibrary:
    """Queries the installed library."""
    command = [sys.executable, "-P", "-m", "penstock.kernels.cpu.isa_report"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return CpuLibrary([], f"the CPU library did not run: {type(error).__name__}", f"run {' '.join(command)}")
    if done.returncode == 0:
        return CpuLibrary(done.stdout.split(), "", "")
    if done.returncode < 0:
        ended = signal.strsignal(-done.returncode)
        return CpuLibrary([], f"the CPU library crashed: {ended}", "install penstock again, on this machine")
    *_, problem, remedy = ["", "", *done.stderr.splitlines()]
    return CpuLibrary([], problem, remedy)
