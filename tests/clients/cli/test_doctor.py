"""The doctor's report for machines of several kinds, and on this one."""

import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys

import pytest

from penstock.clients.cli import doctor
from penstock.clients.cli.doctor import FindingKind, choose, describe, describe_cores, describe_threads, examine
from penstock.clients.host import machine
from penstock.clients.host.cpu.topology import CpuTopology, LogicalCpu
from penstock.clients.host.cpu_library import CpuLibrary, inspect_cpu_library
from penstock.clients.host.machine import Gpu, Package, inspect_machine
from penstock.kernels.cpu import build as build_cpu

GPU = Gpu("NVIDIA H200", 141 << 30, 140 << 30, "570.1", "9.0")
LIBRARY = CpuLibrary(["avx512_bf16", "avx512", "avx2", "generic"], "", "")
NO_LIBRARY = CpuLibrary([], "it is not there", "install a compiler")
NVIDIA_SMI = "NVIDIA H200, 143771, 143000, 570.1, 9.0\nNVIDIA A2, 15356, [N/A], 570.1, 8.6\n"


@pytest.fixture(scope="module")
def here():
    return inspect_machine()


@pytest.fixture
def fitted(here):
    """This machine with all packages, memory to spare and no GPU."""
    packages = [dataclasses.replace(package, version=package.version or "1.0") for package in here.packages]
    return dataclasses.replace(
        here,
        packages=packages,
        gpus=[],
        gpu_problem="",
        available_bytes=64 << 30,
        torch_has_cuda=False,
        visible_gpus=None,
    )


def without(fitted, *names):
    packages = [
        dataclasses.replace(package, version=None) if package.name in names else package for package in fitted.packages
    ]
    return dataclasses.replace(fitted, packages=packages)


def remedies(found, kind):
    return [finding.remedy for finding in examine(found, LIBRARY) if finding.kind is kind]


def test_a_machine_with_all_packages_runs_on_its_cpu(fitted):
    assert choose(fitted, LIBRARY).device == "cpu"
    assert list(examine(fitted, LIBRARY)) == []
    assert "Nothing is missing." in describe(fitted, LIBRARY, choose(fitted, LIBRARY), [])


@pytest.mark.parametrize("has_cuda", [True, False])
def test_a_gpu_is_used_if_torch_can(fitted, has_cuda):
    found = dataclasses.replace(fitted, gpus=[GPU], torch_has_cuda=has_cuda)
    assert choose(found, LIBRARY).device == ("cuda" if has_cuda else "cpu")
    assert remedies(found, FindingKind.MISSING) == []
    assert remedies(found, FindingKind.ADVICE) == ([] if has_cuda else ["install a build of torch with CUDA"])


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        ("", "cpu"),
        ("-1", "cpu"),
        ("1", "cpu"),
        ("-1,0", "cpu"),
        ("0", "cuda"),
        ("0,-1", "cuda"),
        ("GPU-8932f9", "cuda"),
    ],
)
def test_a_gpu_that_the_environment_hides_is_not_used(fitted, monkeypatch, visible, device):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = inspect_machine().visible_gpus
    found = dataclasses.replace(fitted, gpus=[GPU], torch_has_cuda=True, visible_gpus=seen)
    assert choose(found, LIBRARY).device == device
    assert ("CUDA_VISIBLE_DEVICES" in choose(found, LIBRARY).why) == (device == "cpu")


def cpus(num, threads_of_core=1, num_nodes=1):
    return tuple(
        LogicalCpu(number, number % (num // threads_of_core), number * num_nodes // num, is_efficient=False)
        for number in range(num)
    )


def test_the_cpu_library_and_its_instruction_set_are_reported(fitted):
    assert choose(fitted, LIBRARY).backend == "cpu"
    found = dataclasses.replace(fitted, cpu="Some CPU", topology=CpuTopology(cpus(4), 8, quota=3.5))
    lines = list(describe(found, LIBRARY, choose(fitted, LIBRARY), []))
    assert "CPU       Some CPU, cores: 3.5 of 8 usable, quota of 3.5" in lines
    assert "Kernels   the CPU library with avx512_bf16, threads: 3, not pinned" in lines


@pytest.mark.parametrize(
    ("topology", "cores", "threads"),
    [
        (CpuTopology(cpus(8, 2), 8, None), "8 of 8 usable, 8 hardware threads on 4 physical cores", "4, not pinned"),
        (
            CpuTopology(cpus(4, num_nodes=2), 4, None),
            "4 of 4 usable, on 2 NUMA nodes",
            "4 (2 on node 0, 2 on node 1), each kept on its NUMA node",
        ),
        (
            CpuTopology((*cpus(1), LogicalCpu(1, 1, 0, is_efficient=True)), 3, None),
            "2 of 3 usable, 1 of them efficiency cores",
            "2, pinned to 0 1",
        ),
    ],
)
def test_the_cores_found_and_the_threads_chosen_are_reported(topology, cores, threads):
    assert (describe_cores(topology), describe_threads(topology)) == (cores, threads)


def test_a_missing_cpu_library_falls_back_to_plain_torch_with_a_remedy(fitted):
    assert choose(fitted, NO_LIBRARY).backend == "reference"
    (finding,) = examine(fitted, NO_LIBRARY)
    assert (finding.kind, finding.remedy) == (FindingKind.ADVICE, "install a compiler")
    assert "it is not there" in finding.what
    lines = list(describe(fitted, NO_LIBRARY, choose(fitted, NO_LIBRARY), [finding]))
    assert "Kernels   none for a CPU (it is not there)" in lines


def test_without_the_cpu_library_a_gpu_is_used_and_nothing_is_missing(fitted):
    found = dataclasses.replace(fitted, gpus=[GPU], torch_has_cuda=True)
    assert choose(found, LIBRARY) == choose(found, NO_LIBRARY)
    assert list(examine(found, NO_LIBRARY)) == []


def test_the_cpu_library_is_queried(cpu_library):
    found = inspect_cpu_library()
    assert found.levels[-1] == "generic"
    assert found == CpuLibrary(found.levels, "", "")


@pytest.mark.parametrize("content", [None, "", "not a library\n"])
def test_a_cpu_library_that_cannot_be_loaded_comes_with_the_remedy(tmp_path, monkeypatch, content):
    path = tmp_path / "library.so"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", str(path))
    found = inspect_cpu_library()
    assert found.levels == []
    assert str(path) in found.problem
    assert ("PENSTOCK_CPU_LIBRARY" if content is None else "make native") in found.remedy


def test_a_cpu_library_older_than_the_code_comes_with_the_remedy(tmp_path, monkeypatch, cpu_library):
    """It has the table of kernels, and lacks what was added since."""
    older = cpu_library.read_bytes().replace(b"penstock_stages\0", b"penstock_staged\0")
    (tmp_path / "library.so").write_bytes(older)
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", str(tmp_path / "library.so"))
    found = inspect_cpu_library()
    assert (found.levels, found.problem) == ([], "the CPU library is older than this code")
    assert "make native" in found.remedy


def test_a_cpu_library_of_other_sources_comes_with_the_remedy(tmp_path, monkeypatch, cpu_library):
    digest = build_cpu.digest().encode()
    (tmp_path / "library.so").write_bytes(cpu_library.read_bytes().replace(digest, b"0" * len(digest)))
    monkeypatch.setenv("PENSTOCK_CPU_LIBRARY", str(tmp_path / "library.so"))
    found = inspect_cpu_library()
    assert found.levels == []
    assert "built from other sources" in found.problem
    assert found.remedy == "build it again, or unset PENSTOCK_CPU_LIBRARY"


def test_a_crash_of_the_cpu_library_is_reported(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ILL $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "Illegal instruction" in inspect_cpu_library().problem


def test_what_a_server_lacks_is_named_with_the_command(fitted):
    bare = without(fitted, "numpy", "tokenizers", "uvloop")
    (finding,) = examine(bare, LIBRARY)
    assert finding.kind is FindingKind.MISSING
    assert finding.what == "not installed: numpy, tokenizers"
    assert finding.remedy == "pip install 'penstock-llm[cpu]'"
    assert choose(bare, LIBRARY).backend is None
    assert any("cannot run" in line for line in describe(bare, LIBRARY, choose(bare, LIBRARY), [finding]))


def test_what_is_dispensable_is_advice(fitted):
    found = without(fitted, "uvloop")
    assert choose(found, LIBRARY).backend == "cpu"
    assert remedies(found, FindingKind.MISSING) == []
    assert remedies(found, FindingKind.ADVICE) == ["pip install 'penstock-llm[cpu]'"]


def test_only_the_packages_of_the_backend_are_needed(fitted):
    bare = without(fitted, "torch", "transformers", "triton")
    assert choose(bare, LIBRARY).backend == "cpu"
    assert list(examine(bare, LIBRARY)) == []

    assert choose(bare, NO_LIBRARY).backend is None
    (finding,) = examine(bare, NO_LIBRARY)
    assert (finding.kind, finding.what) == (
        FindingKind.MISSING,
        "not installed: torch; needed because it is not there",
    )
    assert finding.remedy == "install a compiler; or pip install 'penstock-llm[torch]'"


def test_a_gpu_needs_torch(fitted):
    bare = without(fitted, "torch", "triton")
    (finding,) = examine(dataclasses.replace(bare, gpus=[GPU]), LIBRARY)
    assert (finding.kind, finding.remedy) == (FindingKind.ADVICE, "pip install 'penstock-llm[cuda]'")
    assert finding.what == "torch is not installed, so the GPU stays idle"


def test_a_python_that_is_not_supported_and_a_broken_driver_are_findings(fitted):
    found = dataclasses.replace(fitted, python="3.14.1", gpu_problem="NVIDIA-SMI has failed", available_bytes=1 << 30)
    assert remedies(found, FindingKind.MISSING) == ["create an environment with Python 3.11 to 3.13"]
    assert len(remedies(found, FindingKind.ADVICE)) == 2
    assert "NVIDIA-SMI has failed" in choose(found, LIBRARY).why


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_limits_of_control_groups_count_wherever_they_are(tmp_path):
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f amx_bf16 avx2x\n",
            "proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": str(8 << 30),
            "sys/fs/cgroup/outer/memory.current": str(6 << 30),
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {1 << 30}\n",
            "sys/fs/cgroup/outer/cpu.max": "50000 100000\n",
        },
    )
    found = inspect_machine(tmp_path)
    assert (found.memory_bytes, found.available_bytes) == (8 << 30, 3 << 30)
    assert found.topology.num_usable == 0.5
    assert found.cpu == "Some CPU"
    assert found.instruction_sets == ["avx2", "avx512f", "amx_bf16"]


def test_limits_of_memory_count_with_version_1_of_control_groups_too(tmp_path):
    memory = "sys/fs/cgroup/memory/pod"
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
            "proc/self/cgroup": "7:memory:/pod/one\n3:cpu,cpuacct:/pod\n",
            f"{memory}/one/memory.limit_in_bytes": "9223372036854771712\n",
            f"{memory}/one/memory.usage_in_bytes": str(2 << 30),
            f"{memory}/memory.limit_in_bytes": str(8 << 30),
            f"{memory}/memory.usage_in_bytes": str(6 << 30),
            f"{memory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {1 << 30}\n",
        },
    )
    found = inspect_machine(tmp_path)
    assert (found.memory_bytes, found.available_bytes) == (8 << 30, 3 << 30)


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/not/seen/here\n", {"cpu.max": "70000 100000\n"}, 0.7),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 64),
        ("0::/a\n", {"a/cpu.max": "\n"}, 64),
        (
            "4:cpu,cpuacct:/a/b\n2:cpuset:/\n0::/\n",
            {
                "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        ("9:cpu:/pod\n", {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 1),
        ("3:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "90000\n", "cpu/cpu.cfs_period_us": "30000\n"}, 3),
        ("3:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "90000\n", "cpuset/a/cpu.cfs_period_us": "30000\n"}, 64),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "90000\n", "cpu/cpu.cfs_period_us": "0\n"}, 64),
    ],
)
def test_the_cpu_quota_of_either_version_of_control_groups_counts(tmp_path, monkeypatch, membership, files, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    write(tmp_path, {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{name}": files[name] for name in files}})
    found = inspect_machine(tmp_path)
    assert found.topology.num_usable == cores
    assert found.topology.num_threads() == max(1, int(cores))


def test_a_machine_that_reveals_nothing_is_still_described(tmp_path):
    found = inspect_machine(tmp_path)
    assert list(describe(found, LIBRARY, choose(found, LIBRARY), list(examine(found, LIBRARY))))


def test_the_hard_limit_of_open_files_is_reported(tmp_path, fitted):
    write(
        tmp_path,
        {"proc/self/limits": "Max open files            1024                 524288               files     \n"},
    )
    found = dataclasses.replace(fitted, open_files=inspect_machine(tmp_path).open_files)
    lines = list(describe(found, LIBRARY, choose(found, LIBRARY), []))
    assert "Files     524,288 may be open at once, connections included" in lines


def fake_nvidia_smi(directory, monkeypatch, script):
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_gpus_come_from_the_drivers_tool(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, f"printf '{NVIDIA_SMI}'")
    first, second = inspect_machine().gpus
    assert first == Gpu("NVIDIA H200", 143771 << 20, 143000 << 20, "570.1", "9.0")
    assert second.free_bytes == 0


def test_a_driver_failure_is_reported_with_its_cause(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "echo 'Driver/library version mismatch'; exit 18")
    found = inspect_machine()
    assert (found.gpus, found.gpu_problem) == ([], "Driver/library version mismatch")


def test_packages_are_those_of_the_bare_install_and_of_its_extras(here):
    assert Package("grpcio", next(p.version for p in here.packages if p.name == "grpcio"), "") in here.packages
    assert {package.extra for package in here.packages} == {
        "",
        "serve",
        "torch",
        "cuda",
        "gateway",
        "bench",
        "ray",
        "smg",
        "zmq",
    }


@pytest.mark.parametrize(
    ("name", "extra"), [("aiohttp", "bench"), ("uvloop", "gateway"), ("fastapi", "gateway"), ("ray", "ray")]
)
def test_a_server_runs_without_what_only_others_use(fitted, name, extra):
    server = [package for package in fitted.packages if package.extra in ("", "serve")]
    lacking = dataclasses.replace(fitted, packages=[*server, Package(name, None, extra)])
    assert choose(lacking, LIBRARY).backend == "cpu"
    assert remedies(lacking, FindingKind.MISSING) == []
    assert remedies(lacking, FindingKind.ADVICE) == [f"pip install 'penstock-llm[{extra}]'"]


def test_json_is_for_programs(capsys):
    status = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"machine", "threads", "cpu_library", "choice", "findings"}
    assert len(report["machine"]["topology"]["cpus"]) >= report["threads"]["num_threads"] >= 1
    assert report["cpu_library"] == dataclasses.asdict(inspect_cpu_library())
    assert status == any(finding["kind"] == "missing" for finding in report["findings"])


def test_the_exit_status_shows_whether_a_server_can_run(monkeypatch, capsys, fitted):
    monkeypatch.setattr(doctor, "inspect_machine", lambda: fitted)
    assert doctor.main([]) == 0
    monkeypatch.setattr(doctor, "inspect_machine", lambda: without(fitted, "tokenizers"))
    assert doctor.main([]) == 1
    assert "pip install" in capsys.readouterr().out


def test_it_imports_nothing_that_a_bare_install_lacks():
    code = (
        "import sys; from penstock.clients.cli import doctor; doctor.main([]);"
        "print([name for name in ('torch', 'numpy', 'psutil', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_cuda_support_of_torch_is_read_from_its_own_files():
    torch = importlib.metadata.distribution("torch")
    version = torch.locate_file("torch/version.py").read_text()
    assert machine.torch_has_cuda() == (re.search(r"^cuda.*= None", version, re.MULTILINE) is None)
