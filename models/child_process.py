"""What the service's child processes have in common: the environment that they get, their turn where memory runs out,
and that they leave no core file. Imports next to nothing."""

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path

PASSED_VARIABLE = "PENSTOCK_CHILD_ENV"
"""Of the environment: names more variables for child processes, separated by commas."""
CORES_VARIABLE = "PENSTOCK_CORE_DUMPS"
"""Of the environment: 1 lets child processes leave core files."""

FED_BY_STRANGERS = 1000
"""``oom_score_adj`` of a process that reads what callers send, and that the service replaces at no cost."""
SERVICE = 550
"""Of the service's own process. Its end ends all streams, so that it goes before the worker only where it has grown to
the worker's size."""
WORKER = 500

_PR_SET_DUMPABLE = 4
_NAMES = frozenset(
    """
    CC CONDA_PREFIX CXX DISPLAY HOME HOSTNAME LANG LANGUAGE LD_LIBRARY_PATH LD_PRELOAD LOGNAME NO_COLOR PATH PWD SHELL
    SOURCE_DATE_EPOCH SSL_CERT_DIR SSL_CERT_FILE TEMP TERM TMP TMPDIR TOKENIZERS_PARALLELISM TZ TZDIR USER VIRTUAL_ENV
    """.split()  # noqa: SIM905 - a list of words
)
_PREFIXES = re.compile(
    "ASAN_|ATEN_|BLIS_|COV_|COVERAGE_|CUBLAS|CUDA|CUDNN|DNNL_|GLIBC_|GLOO_|GOMP_|GRPC_|HF_HOME|HF_HUB_|KINETO_|KMP_|LC_|"
    "LSAN_|MALLOC_|MKL_|NCCL_|NUMEXPR_|NVIDIA_|OMP_|ONEDNN_|OPENBLAS_|PENSTOCK_|PYTEST_XDIST_|PYTHON|PYTORCH_|QEMU_|"
    "RUST_|TORCH|TRITON_|TSAN_|UBSAN_|VECLIB_|XDG_"
)
_SECRET = re.compile("AUTH|CREDENTIAL|KEY|PASS|SECRET|TOKEN(?!IZERS_)")
"""Parts of names that speak of secrets, whatever the prefix."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child process gets of the service's environment: what Python, the libraries that compute and our own code
    read. Keys, hub tokens and whatever else the service was started with stay out."""
    more = {name.strip() for name in environ.get(PASSED_VARIABLE, "").split(",")}
    return {name: value for name, value in environ.items() if name in more or _is_needed(name)}


def _is_needed(name: str) -> bool:
    return name in _NAMES or (_PREFIXES.match(name) is not None and _SECRET.search(name) is None)


def offer_to_oom_killer(score: int) -> None:
    """Has the kernel end this process the sooner, where memory runs out. Raising the score needs no privilege."""
    with contextlib.suppress(OSError):  # a system without it, or one whose operator allows no lower score
        Path("/proc/self/oom_score_adj").write_text(str(score))


def offer_service_to_oom_killer() -> None:
    """The same for the service's own process, unless its supervisor chose a score."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/self/oom_score_adj").read_text()) == 0:
            offer_to_oom_killer(SERVICE)


def forbid_core_dumps(environ: Mapping[str, str]) -> None:
    """Has this process leave no core file, which would hold prompts and weights: neither on disk nor with a program
    that the kernel passes cores to, to which no limit of size applies. A debugger needs root then."""
    if environ.get(CORES_VARIABLE) == "1":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def prepare_child(score: int) -> None:
    """Does what every child process does first. In this order: only root may write the score of a process that leaves
    no cores."""
    offer_to_oom_killer(score)
    forbid_core_dumps(os.environ)
