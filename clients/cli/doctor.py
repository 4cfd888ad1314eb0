"""``penstock doctor``: reports what this machine has, which backend will run and why, and what is missing, with
remedies; or why a service cannot be reached."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import ConnectionOptions, add_connection_flags, connection
from penstock.clients.cli.reachability import reach
from penstock.clients.host.cpu.thread_placement import ThreadPlacement, place_threads
from penstock.clients.host.cpu.topology import CpuTopology
from penstock.clients.host.cpu_library import CpuLibrary, inspect_cpu_library
from penstock.clients.host.distribution import install_command
from penstock.clients.host.machine import Machine, Package, has_gpu, inspect_machine

_OPTIONAL = {
    "bench": "for plots and OpenAI's API in penstock bench",
    "gateway": "for OpenAI's API: penstock gateway, penstock serve --http-port",
    "ray": "for replicas under Ray Serve",
    "zmq": "for KV events: penstock serve --kv-events-config",
}
"""Extras that a service does not need, and their purpose."""
_EXTRAS = {"cpu": ("", "serve", "cpu"), "reference": ("", "serve", "torch"), "cuda": ("", "serve", "torch", "cuda")}
"""The extras whose packages each backend needs. The last one installs them all."""
_DISPENSABLE = {
    "transformers": "the tests compare results with it",
    "triton": "GPU kernels need it",
    "uvloop": "without it, the event loop takes twice as much CPU time",
}


class FindingKind(Enum):
    """The severity of a finding."""

    MISSING = "missing"
    """``penstock serve`` cannot run."""
    ADVICE = "advice"
    """It runs, but not as well as it could on this machine."""


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy."""

    kind: FindingKind
    what: str
    remedy: str


@dataclass(frozen=True)
class BackendChoice:
    """The default backend of ``penstock serve``."""

    backend: str | None
    """None if it cannot run."""
    device: str | None
    why: str


def main(argv: list[str]) -> int:
    """Runs the command; the status is 1 if ``penstock serve`` cannot run here."""
    arguments = make_parser().parse_args(argv)
    if arguments.target is not None:
        return _examine_service(connection(arguments, arguments.target), as_json=arguments.json)
    machine, library = inspect_machine(), inspect_cpu_library()
    choice, findings = choose(machine, library), list(examine(machine, library))
    if arguments.json:
        report = {
            "machine": dataclasses.asdict(machine),
            "threads": dataclasses.asdict(_placement(machine.topology)),
            "cpu_library": dataclasses.asdict(library),
            "choice": dataclasses.asdict(choice),
            "findings": [{**dataclasses.asdict(finding), "kind": finding.kind.value} for finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(describe(machine, library, choice, findings)))
    return int(any(finding.kind is FindingKind.MISSING for finding in findings))


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "doctor",
        "Shows what this machine has, which backend penstock serve will use, and what is missing.",
        "examples:\n"
        "  penstock doctor                                                        this machine\n"
        "  penstock doctor --target penstock.example.com:50051 --tls-ca ca.pem    the connection to a service\n\n"
        "exit status: 0 if penstock serve can run here, 1 if not (chat and generate --target may still work);\n"
        "with --target: 0 if the service answers, 1 if not",
    )
    parser.add_argument("--json", action="store_true", help="print JSON (default: a table)")
    add_connection_flags(parser, "check the connection to this service, or unix:PATH, instead of this machine")
    return parser


def _examine_service(service: ConnectionOptions, *, as_json: bool) -> int:
    """Reports whether a service can be reached; returns the exit status."""
    reached = reach(service)
    if as_json:
        print(json.dumps({"target": service.target, **dataclasses.asdict(reached)}, indent=2))
    elif reached.problem:
        print(f"{service.target}: {reached.problem}\n  -> {reached.remedy}")
    else:
        print(f"{service.target} answers: {reached.model}, penstock {reached.version}")
    return int(bool(reached.problem))


def _backend(machine: Machine, library: CpuLibrary) -> str:
    """Returns the backend that runs once its packages are installed."""
    if machine.default_device()[0] != "cpu":
        return "cuda"
    return "cpu" if library.levels else "reference"


def _lacking(machine: Machine, library: CpuLibrary) -> tuple[list[Package], list[Package]]:
    """Returns the packages that the backend lacks: those that it cannot run without, and dispensable ones."""
    extras = _EXTRAS[_backend(machine, library)]
    lacking = [package for package in machine.missing() if package.extra in extras]
    needed = [package for package in lacking if package.name not in _DISPENSABLE]
    return needed, [package for package in lacking if package not in needed]


def choose(machine: Machine, library: CpuLibrary) -> BackendChoice:
    """Returns the backend that will run, and the reason."""
    if _lacking(machine, library)[0]:
        return BackendChoice(None, None, "packages that a server needs are not installed")
    backend, (device, why) = _backend(machine, library), machine.default_device()
    runs = {
        "cpu": f"the CPU library with {next(iter(library.levels), '')}",
        "cuda": "kernels in Triton on the GPU",
        "reference": "plain torch on the CPU",
    }
    return BackendChoice(backend, device, f"{runs[backend]}: {why}")


def examine(machine: Machine, library: CpuLibrary) -> Iterator[Finding]:
    """Yields what is missing, then advice."""
    version = tuple(map(int, machine.python.split(".")[:2]))
    if not (3, 11) <= version < (3, 14):
        what = f"Python {machine.python} is not supported"
        yield Finding(FindingKind.MISSING, what, "create an environment with Python 3.11 to 3.13")
    backend, (needed, dispensable) = _backend(machine, library), _lacking(machine, library)
    install = install_command(_EXTRAS[backend][-1])
    if needed:
        what = f"not installed: {', '.join(package.name for package in needed)}"
        if any(package.extra == "torch" for package in needed) and backend == "reference":
            what, install = f"{what}; needed because {library.problem}", f"{library.remedy}; or {install}"
        yield Finding(FindingKind.MISSING, what, install)
    else:
        for package in dispensable:
            what = f"not installed: {package.name} ({_DISPENSABLE[package.name]})"
            yield Finding(FindingKind.ADVICE, what, install)
    if backend == "reference" and not needed:
        what = f"models run in plain torch, many times slower: {library.problem}"
        yield Finding(FindingKind.ADVICE, what, library.remedy)
    listed = {package.name for package in needed + dispensable}  # some are in two extras
    for extra, purpose in _OPTIONAL.items():
        names = [package.name for package in machine.missing() if package.extra == extra and package.name not in listed]
        if names:
            what = f"not installed: {', '.join(names)} ({purpose})"
            yield Finding(FindingKind.ADVICE, what, install_command(extra))
    if machine.gpu_problem or (has_gpu() and not machine.gpus):
        what = f"the GPU cannot be used: {machine.gpu_problem}"
        yield Finding(FindingKind.ADVICE, what, "repair the driver until nvidia-smi lists the GPU")
    if machine.gpus and not machine.torch_has_cuda:
        if "torch" in {package.name for package in machine.missing()}:
            what, remedy = "torch is not installed", install_command("cuda")
        else:
            what, remedy = "this torch was built without CUDA", "install a build of torch with CUDA"
        yield Finding(FindingKind.ADVICE, f"{what}, so the GPU stays idle", remedy)
    if machine.available_bytes < 2 << 30:
        what = f"only {_gib(machine.available_bytes)} of memory is available"
        yield Finding(FindingKind.ADVICE, what, "close other programs, or serve with a small --kv-cache-memory-bytes")


def describe(machine: Machine, library: CpuLibrary, choice: BackendChoice, findings: list[Finding]) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f"penstock  {machine.penstock}"
    yield f"Python    {machine.python} at {machine.python_path}"
    yield f"System    {machine.system}"
    yield f"CPU       {machine.cpu}, cores: {describe_cores(machine.topology)}"
    yield f"          {' '.join(machine.instruction_sets) or 'no instruction set that the kernels use'}"
    if library.levels:
        yield f"Kernels   the CPU library with {library.levels[0]}, threads: {describe_threads(machine.topology)}"
    else:
        yield f"Kernels   none for a CPU ({library.problem})"
    yield f"Memory    {_gib(machine.memory_bytes)}, of which {_gib(machine.available_bytes)} are available"
    if machine.open_files:
        yield f"Files     {machine.open_files:,} may be open at once, connections included"
    for gpu in machine.gpus:
        yield (
            f"GPU       {gpu.name}: {_gib(gpu.memory_bytes)}, of which {_gib(gpu.free_bytes)} are free, "
            f"compute capability {gpu.compute_capability}, driver {gpu.driver}"
        )
    if not machine.gpus:
        yield f"GPU       none{f' ({machine.gpu_problem})' if machine.gpu_problem else ''}"
    yield "Packages"
    width = max((len(package.name) for package in machine.packages), default=0)
    for package in machine.packages:
        needed = f"  (for {package.extra})" if package.extra else ""
        yield f"  {package.name:{width}}  {package.version or 'not installed'}{needed}"
    yield ""
    if choice.backend is None:
        yield f"penstock serve cannot run: {choice.why}"
    else:
        yield f"penstock serve will use the {choice.backend} backend on {choice.device}: {choice.why}"
    for finding in findings:
        yield f"{finding.kind.value}: {finding.what}"
        yield f"  -> {finding.remedy}"
    if not findings:
        yield "Nothing is missing."


def describe_cores(topology: CpuTopology) -> str:
    """Describes what a process may use of the machine's processors."""
    parts = [f"{topology.num_usable:g} of {topology.num_online} usable"]
    if topology.num_cores < len(topology.cpus):
        parts.append(f"{len(topology.cpus)} hardware threads on {topology.num_cores} physical cores")
    if efficient := len({cpu.core for cpu in topology.cpus if cpu.is_efficient}):
        parts.append(f"{efficient} of them efficiency cores")
    if len(topology.nodes) > 1:
        parts.append(f"on {len(topology.nodes)} NUMA nodes")
    if topology.quota is not None:
        parts.append(f"quota of {topology.quota:g}")
    return ", ".join(parts)


def describe_threads(topology: CpuTopology) -> str:
    """Describes the compute threads that penstock serve starts without flags."""
    placement = _placement(topology)
    if placement.is_pinned:
        kept = f", pinned to {' '.join(str(cpu) for (cpu,) in placement.cpus)}"
    else:
        kept = ", each kept on its NUMA node" if placement.nodes else ", not pinned"
    counts = Counter(placement.nodes)
    shares = f" ({', '.join(f'{count} on node {node}' for node, count in counts.items())})" if counts else ""
    return f"{placement.num_threads}{shares}{kept}"


def _placement(topology: CpuTopology) -> ThreadPlacement:
    return place_threads(topology, topology.num_threads(), "auto")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
