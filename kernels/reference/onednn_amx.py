"""Keeps torch from AMX where its products of bfloat16 would die of an illegal instruction.

Some virtual machines show AMX, and hide the CPUID leaf from which oneDNN, torch's library, reads how tiles are set up.
Knows no model, and imports torch only where there is something to try.
"""

import faulthandler
import os
import resource
import signal
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Of the environment: names the most that oneDNN may use. Read at its first product, inherited by child processes."""
WITHOUT_TILES = "AVX512_CORE_FP16"
TRIAL_S = 20
"""For the trial, which takes some milliseconds."""


def avoid_broken_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Where the processor has AMX, tries a product in a child process, some 50 ms; if the child dies, oneDNN does
    without AMX in this process and its children. To be called before torch's first product."""
    if VARIABLE in os.environ or not cpuinfo.exists() or " amx_tile " not in cpuinfo.read_text():
        return
    import torch  # fork copies it; the child computes with one thread, whatever was set here

    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TRIAL_S)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            torch.set_num_threads(1)
            ones = torch.ones(16, 64, dtype=torch.bfloat16)
            torch.nn.functional.linear(ones, ones)
        finally:  # whatever is raised: the child must never go on as a second parent
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        os.environ[VARIABLE] = WITHOUT_TILES
