"""The machine's hardware and software, read from the kernel, the driver's tool and the installed packages' metadata.

Imports none of the packages that it reports, so that it is fast and works on the bare install or with a broken torch.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.clients.host.cpu.control_groups import control_groups, read
from penstock.clients.host.cpu.topology import CpuTopology, read_topology
from penstock.clients.host.distribution import NAME, installed_version

_INSTRUCTION_SETS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_MEMORY_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Control groups of version 2 and of version 1: the controller, and the files with the limit, the usage and the
cached part of it."""
_GPU_QUERY = "name,memory.total,memory.free,driver_version,compute_cap"


@dataclass(frozen=True)
class Gpu:
    """A graphics processor, as its driver describes it."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    compute_capability: str


@dataclass(frozen=True)
class Package:
    """A package that penstock uses, and its version if it is installed."""

    name: str
    version: str | None
    extra: str
    """The extra that installs it: ``server``, ``gateway`` or ``bench``, or empty for the bare package."""


@dataclass(frozen=True)
class Machine:
    """A machine at one moment."""

    penstock: str
    python: str
    python_path: str
    system: str
    cpu: str
    topology: CpuTopology
    """The processors that this process may use."""
    instruction_sets: list[str]
    """The instruction sets that kernels for language models use."""
    memory_bytes: int
    """The memory of the machine, or of the control group if that is less."""
    available_bytes: int
    open_files: int
    """The hard limit of open files, including connections; 0 if unknown."""
    gpus: list[Gpu]
    gpu_problem: str
    """Why the driver's tool failed; empty if it did not, or if it is not installed."""
    packages: list[Package]
    torch_has_cuda: bool
    visible_gpus: str | None
    """The environment's CUDA_VISIBLE_DEVICES, which torch follows; None: all."""

    def default_device(self) -> tuple[str, str]:
        """The default device of ``penstock serve``, ``cuda`` or ``cpu``, and the reason."""
        if not self.gpus:
            return "cpu", self.gpu_problem or "there is no NVIDIA GPU"
        if not self.torch_has_cuda:
            return "cpu", "there is a GPU, but no torch that was built with CUDA"
        if self.visible_gpus is not None:
            # The first invalid entry ends the list. Names other than numbers are UUIDs, which the driver knows.
            first = self.visible_gpus.partition(",")[0].strip()
            if not first or first.startswith("-") or (first.isdigit() and int(first) >= len(self.gpus)):
                return "cpu", f"CUDA_VISIBLE_DEVICES={self.visible_gpus!r} hides the GPU"
        return "cuda", self.gpus[0].name

    def missing(self) -> list[Package]:
        """Packages that are not installed."""
        return [package for package in self.packages if package.version is None]


def inspect_machine(root: Path = Path("/")) -> Machine:
    """Inspects this machine; ``root`` is where /proc and /sys are."""
    cpu_info = read(root / "proc/cpuinfo")
    memory_bytes, available_bytes = _memory(root)
    gpus, gpu_problem = _gpus()
    return Machine(
        penstock=installed_version(),
        python=platform.python_version(),
        python_path=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_line(cpu_info, "model name") or platform.processor() or platform.machine(),
        topology=read_topology(root),
        instruction_sets=_instruction_sets(cpu_info),
        memory_bytes=memory_bytes,
        available_bytes=available_bytes,
        open_files=_open_files(root),
        gpus=gpus,
        gpu_problem=gpu_problem,
        packages=list(_packages()),
        torch_has_cuda=torch_has_cuda(),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return Path(str(torch.locate_file("torch/lib/libtorch_cuda.so"))).exists()


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is loaded, without calling it."""
    return Path("/dev/nvidiactl").exists()


def _memory(root: Path) -> tuple[int, int]:
    """Returns total and available bytes, each the minimum of the machine and the control groups."""
    info = read(root / "proc/meminfo")
    total, available = (_kibibytes(_line(info, name)) for name in ("MemTotal", "MemAvailable"))
    for controller, limit_file, used_file, cached_line in _MEMORY_FILES:
        for group in control_groups(root, controller):
            limit, used = (read(group / name).strip() for name in (limit_file, used_file))
            if limit.isdigit() and used.isdigit():  # without a limit it is ``max``, or more than any machine has
                cached = re.search(rf"^{cached_line} (\d+)$", read(group / "memory.stat"), re.MULTILINE)
                left = int(limit) - int(used) + (int(cached[1]) if cached else 0)
                total, available = min(total, int(limit)), min(available, max(left, 0))
    return total, available


def _open_files(root: Path) -> int:
    limit = re.search(r"^Max open files +\S+ +(\d+)", read(root / "proc/self/limits"), re.MULTILINE)
    return int(limit[1]) if limit else 0


def _instruction_sets(cpu_info: str) -> list[str]:
    flags = set((_line(cpu_info, "flags") or _line(cpu_info, "Features")).split())
    return [name for name in _INSTRUCTION_SETS if name in flags]


def _gpus() -> tuple[list[Gpu], str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is a driver, but no nvidia-smi" if has_gpu() else ""
    command = [program, f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi failed: {type(error).__name__}"
    if done.returncode:
        return [], " ".join((done.stdout or done.stderr).split())[:200]
    return list(_parse_gpus(done.stdout)), ""


def _parse_gpus(table: str) -> Iterator[Gpu]:
    for row in table.splitlines():
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == len(_GPU_QUERY.split(",")):
            name, total, free, driver, capability = cells
            yield Gpu(name, _mebibytes(total), _mebibytes(free), driver, capability)


def _packages() -> Iterator[Package]:
    """Yields the dependencies of the installed penstock. A part of penstock itself, such as the demo model, is included
    only if it is installed: a checkout needs none of them."""
    for requirement in importlib.metadata.requires(NAME) or ():
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([a-z]+)""", requirement)
        if name is None or name[0] == NAME or (extra is not None and extra[1] in ("all", "dev")):
            continue
        version = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name[0])
        if version is None and name[0].startswith(NAME):
            continue
        yield Package(name[0], version, extra[1] if extra else "")


def _line(text: str, name: str) -> str:
    """Returns the value of the first line ``name : value``; empty if there is none."""
    found = re.search(rf"^{re.escape(name)}\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _kibibytes(text: str) -> int:
    number = text.partition(" ")[0]
    return int(number) << 10 if number.isdigit() else 0


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0
