"""Sets up the service's child processes: their environment, their score when memory runs out, and no core files.
Imports very little."""

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

PASSED_VARIABLE = "PENSTOCK_CHILD_ENV"
"""The environment variable that names further variables for child processes, comma-separated."""
CORES_VARIABLE = "PENSTOCK_CORE_DUMPS"
"""The environment variable that lets child processes write core files if it is 1."""

FED_BY_STRANGERS = 1000
"""The ``oom_score_adj`` of a process that reads what clients send, and that the service can replace at no cost."""
SERVICE = 550
"""The score of the service's own process. All streams end with it, so it is killed before the worker only if it has
grown to the worker's size."""
WORKER = 500

_PR_SET_DUMPABLE = 4
_NAMES = frozenset(
    """
    CC CONDA_PREFIX CPATH CPLUS_INCLUDE_PATH CXX C_INCLUDE_PATH DISPLAY GCC_EXEC_PREFIX HOME HOSTNAME LANG LANGUAGE
    LD_LIBRARY_PATH LD_PRELOAD LIBRARY_PATH LOGNAME NO_COLOR PATH PWD SHELL SOURCE_DATE_EPOCH SSL_CERT_DIR
    SSL_CERT_FILE TEMP TERM TMP TMPDIR TOKENIZERS_PARALLELISM TZ TZDIR USER VIRTUAL_ENV
    """.split()  # noqa: SIM905 - a list of words
)
_PREFIXES = re.compile(
    "ASAN_|ATEN_|BLIS_|COV_|COVERAGE_|CUBLAS|CUDA|CUDNN|DNNL_|GLIBC_|GLOO_|GOMP_|GRPC_|HF_HOME|HF_HUB_|KINETO_|KMP_|LC_|"
    "LSAN_|MALLOC_|MKL_|NCCL_|NUMEXPR_|NVIDIA_|OMP_|ONEDNN_|OPENBLAS_|PENSTOCK_|PYTEST_XDIST_|PYTHON|PYTORCH_|QEMU_|"
    "RUST_|TORCH|TRITON_|TSAN_|UBSAN_|VECLIB_|XDG_"
)
_SECRET = re.compile("AUTH|CREDENTIAL|KEY|PASS|SECRET|TOKEN(?!IZERS_)")
"""Parts of names that suggest a secret, whatever the prefix."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of the service's environment that a child process gets: what Python, the numerical libraries and
    our own code read. Keys, hub tokens and everything else stay out."""
    more = {name.strip() for name in environ.get(PASSED_VARIABLE, "").split(",")}
    return {
        name: value
        for name, value in environ.items()
        if name in more or name in _NAMES or (_PREFIXES.match(name) and not _SECRET.search(name))
    }


def offer_to_oom_killer(score: int) -> None:
    """Makes the kernel end this process sooner when memory runs out. Raising the score needs no privilege."""
    with contextlib.suppress(OSError):  # the system lacks it, or its operator allows no lower score
        Path("/proc/self/oom_score_adj").write_text(str(score))


def offer_service_to_oom_killer() -> None:
    """Does the same for the service's own process, unless its supervisor chose a score."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/self/oom_score_adj").read_text()) == 0:
            offer_to_oom_killer(SERVICE)


def forbid_core_dumps(environ: Mapping[str, str]) -> None:
    """Prevents core files of this process, which would contain prompts and weights, both on disk and through a program
    that the kernel pipes cores to, to which no size limit applies. A debugger then needs root."""
    if environ.get(CORES_VARIABLE) == "1":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def prepare_child(score: int) -> None:
    """Does what every child process does first, in this order: without cores, only root may write the score."""
    offer_to_oom_killer(score)
    forbid_core_dumps(os.environ)
