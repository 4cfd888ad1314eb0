"""Keeps torch from using AMX where its bfloat16 products would crash with an illegal instruction.

Some virtual machines report AMX but hide the CPUID leaf from which oneDNN, torch's library, reads the tile
configuration. Imports torch only if there is something to try.
"""

import faulthandler
import os
import resource
import signal
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""The environment variable that limits the instruction set of oneDNN, which reads it at its first product. Child
processes inherit it."""
WITHOUT_TILES = "AVX512_CORE_FP16"
TRIAL_S = 20
"""The time limit of the trial, which takes a few milliseconds."""


def avoid_broken_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """If the processor has AMX, tries a product in a child process, which takes some 50 ms. If the child crashes, turns
    AMX off for oneDNN in this process and its children. Call it before torch's first product."""
    if VARIABLE in os.environ or not cpuinfo.exists() or " amx_tile " not in cpuinfo.read_text():
        return
    import torch  # fork copies it; the child computes with one thread whatever the number here

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
        finally:  # even after an exception: the child must never continue as a second parent
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        os.environ[VARIABLE] = WITHOUT_TILES
