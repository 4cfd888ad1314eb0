"""What ``penstock serve`` decides of the worker: device, threads, memory; and how it tells what runs."""

import dataclasses
from typing import Any

import msgspec
import pytest

from penstock.clients.cli.doctor import choose
from penstock.clients.host.cpu.topology import read_topology
from penstock.clients.host.cpu_library import CpuLibrary
from penstock.clients.host.machine import Gpu, inspect_machine
from penstock.models.errors import ModelError
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.app import prepare, serve
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig

GPU = Gpu("NVIDIA H200", 141 << 30, 140 << 30, "570.1", "9.0")


def worker_of(monkeypatch, machine, **flags):
    monkeypatch.setattr(prepare, "inspect_machine", lambda: machine)
    return prepare.prepare(ServeConfig(port=0, **flags)).worker


def test_the_priorities_of_objectives_reach_the_service_and_its_gateway():
    config = ServeConfig(port=0, objectives='{"batch": 10}')
    assert prepare.prepare(config).server.objectives == {"batch": 10}
    assert '--objectives={"batch": 10}' in prepare.http_options(config)
    with pytest.raises(ConfigError, match="--objectives: batch: the priority must be a whole number"):
        ServeConfig(objectives='{"batch": "last"}')


def test_the_worker_keeps_to_the_limits_of_the_control_groups_around_it(tmp_path, monkeypatch):
    files = {
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": str(8 << 30),
        "sys/fs/cgroup/outer/memory.current": str(6 << 30),
        "sys/fs/cgroup/outer/inner/cpu.max": "100000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    worker = worker_of(monkeypatch, inspect_machine(tmp_path))
    assert (worker.max_memory_bytes, worker.num_threads) == (2 << 30, 1)
    assert worker_of(monkeypatch, inspect_machine(tmp_path), threads=3).num_threads == 3


@pytest.mark.parametrize(
    ("changes", "device"),
    [
        ({}, "cuda"),
        ({"visible_gpus": ""}, "cpu"),
        ({"visible_gpus": "-1"}, "cpu"),
        ({"torch_has_cuda": False}, "cpu"),
        ({"gpus": [], "gpu_problem": "Driver/library version mismatch"}, "cpu"),
    ],
)
def test_the_device_matches_the_doctors_choice(monkeypatch, changes, device):
    fitted: dict[str, Any] = {"gpus": [GPU], "gpu_problem": "", "torch_has_cuda": True, "visible_gpus": None}
    machine = dataclasses.replace(inspect_machine(), **{**fitted, **changes})
    worker = worker_of(monkeypatch, machine)
    assert worker.device == choose(machine, CpuLibrary([], "", "")).device == device
    assert worker.memory_utilization == (0.9 if device == "cuda" else 0.5)
    assert worker_of(monkeypatch, machine, device="cuda:1").device == "cuda:1"
    assert worker_of(monkeypatch, machine, backend="cpu").device == "cpu"


def test_evicted_kv_gets_the_host_memory_that_it_is_given(monkeypatch):
    machine = inspect_machine()
    assert worker_of(monkeypatch, machine).host_kv_cache_bytes == 0
    assert worker_of(monkeypatch, machine, host_kv_cache_bytes=3 << 30).host_kv_cache_bytes == 3 << 30


@pytest.mark.parametrize(("threads", "is_too_many"), [(None, False), (2, False), (3, True)])
def test_more_threads_than_cores_are_warned_of(monkeypatch, caplog, tmp_path, threads, is_too_many):
    topology = read_topology(tmp_path, set(range(4)))
    machine = dataclasses.replace(inspect_machine(), topology=dataclasses.replace(topology, quota=2.5))
    assert worker_of(monkeypatch, machine, threads=threads).num_threads == (threads or 2)
    assert ("--threads 3: this process may use only 2.5 cores" in caplog.text) == is_too_many


def test_threads_are_placed_before_the_worker_starts(monkeypatch, tmp_path):
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
    machine = dataclasses.replace(inspect_machine(), topology=read_topology(tmp_path, set(range(4))))
    worker = worker_of(monkeypatch, machine)
    assert (worker.num_threads, worker.thread_nodes) == (4, (0, 0, 1, 1))
    assert worker.thread_cpus == ((0, 1), (0, 1), (2, 3), (2, 3))
    assert worker_of(monkeypatch, machine, cpu_pinning="on").thread_cpus == ((0,), (1,), (2,), (3,))
    assert worker_of(monkeypatch, machine, cpu_pinning="off").thread_cpus == ()
    with pytest.raises(ModelError, match="--cpu-pinning on: 5 threads"):
        worker_of(monkeypatch, machine, cpu_pinning="on", threads=5)


def test_ranks_are_as_many_as_gpus_and_parts_of_the_model(monkeypatch):
    fitted: dict[str, Any] = {"gpus": [GPU, GPU], "gpu_problem": "", "torch_has_cuda": True, "visible_gpus": None}
    machine = dataclasses.replace(inspect_machine(), **fitted)
    assert worker_of(monkeypatch, machine, tensor_parallel_size=2).tensor_parallel_size == 2
    with pytest.raises(ModelError, match="--tensor-parallel-size 3: the model has 2 key and value heads"):
        worker_of(monkeypatch, machine, tensor_parallel_size=3)
    with pytest.raises(ModelError, match="--tensor-parallel-size 2: each rank needs a GPU, and this machine has 1"):
        worker_of(monkeypatch, dataclasses.replace(machine, gpus=[GPU]), tensor_parallel_size=2)
    with pytest.raises(
        ModelError, match="--tensor-parallel-size 2 times --pipeline-parallel-size 2: each rank needs a GPU"
    ):
        worker_of(monkeypatch, machine, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert worker_of(monkeypatch, machine, device="cpu", tensor_parallel_size=2).device == "cpu"


def test_sizes_per_rank_are_described_as_such():
    facts = WorkerFacts(8, 16, 64, 128, 500, 200, "Arch", "reference", "cuda:0", "float16", "float16", 3 << 20, 1 << 20)
    facts = msgspec.structs.replace(facts, tensor_parallel_size=4)
    assert serve.describe(facts, SchedulerConfig()).splitlines() == [
        "Arch, float16, weights of 3 MiB per rank, context 128",
        "backend reference on 4 ranks of cuda, steps of at most 200 sequences and 200 tokens",
        "KV cache of 128 tokens in float16, 1 MiB per rank",
    ]
    facts = msgspec.structs.replace(facts, device="cpu", num_threads=3)
    assert "on 4 ranks of cpu (3 threads per rank), " in serve.describe(facts, SchedulerConfig())
    facts = msgspec.structs.replace(facts, stage_layers=(2, 3))
    told = serve.describe(facts, SchedulerConfig())
    assert "on 2 stages of 2, 3 layers, each on 4 ranks of cpu (3 threads on the first rank), " in told


def test_the_effective_limits_are_described():
    facts = WorkerFacts(8, 16, 64, 128, 500, 200, "Arch", "reference", "cuda:1", "float16", "float16", 3 << 20, 1 << 20)
    assert serve.describe(facts, SchedulerConfig(max_num_seqs=400)).splitlines() == [
        "Arch, float16, weights of 3 MiB, context 128",
        "backend reference on cuda:1, steps of at most 200 sequences and 200 tokens",
        "KV cache of 128 tokens in float16, 1 MiB",
    ]
    facts = msgspec.structs.replace(facts, num_host_blocks=100)
    last_line = serve.describe(facts, SchedulerConfig()).splitlines()[-1]
    assert last_line == "KV cache of 128 tokens in float16, 1 MiB; 1,600 tokens more in host memory"


def test_what_long_sequences_take_where_layers_have_windows_is_described():
    """Of 300 blocks, a short sequence takes 3 for 16 tokens; one of 4,096 takes 256, and 2 x 15 for its windows."""
    sizes = (300, 16, 64, 4096, 50, 64)
    facts = WorkerFacts(*sizes, "Arch", "cpu", "cpu", "bfloat16", "bfloat16", 3 << 20, 1 << 20)
    facts = msgspec.structs.replace(facts, num_window_groups=2, window=150, num_host_blocks=30)
    last_line = serve.describe(facts, SchedulerConfig()).splitlines()[-1]
    expected = "KV cache of 1,600 tokens, or 4,296 in sequences of 4,096, in bfloat16, 1 MiB"
    assert last_line == f"{expected}; 160 tokens more in host memory"
