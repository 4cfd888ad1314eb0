"""Which cores threads stay on, and that they do."""

import contextlib
import os

import pytest
from waiting import wait_until

from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.cores import choose_cores
from penstock.models.errors import ModelError

MACHINE = 8


@pytest.fixture
def allow(monkeypatch):
    """Of a machine of eight cores, those that this process may use."""

    def set_cores(*cores):
        monkeypatch.setattr(os, "cpu_count", lambda: MACHINE)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))

    return set_cores


def test_threads_that_fill_cores_of_their_own_stay_there(allow, tmp_path):
    allow(2, 3, 5)
    assert choose_cores("auto", 3, tmp_path) == [2, 3, 5]
    assert choose_cores("off", 3, tmp_path) is None


@pytest.mark.parametrize(
    ("cores", "num_threads"),
    [
        pytest.param(range(MACHINE), MACHINE, id="all cores, which another service has as well"),
        pytest.param(range(MACHINE), 3, id="some of all cores, which another service would choose as well"),
        pytest.param((2, 3, 5), 2, id="a quota of two, or --threads 2: a second service may have the same mask"),
        pytest.param((2, 3, 5), 4, id="more threads than cores"),
    ],
)
def test_other_threads_are_left_to_the_system(allow, tmp_path, cores, num_threads):
    allow(*cores)
    assert choose_cores("auto", num_threads, tmp_path) is None


def test_hardware_threads_of_a_core_are_taken_last(allow, tmp_path):
    allow(*range(1, MACHINE))
    for core in range(MACHINE):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert choose_cores("on", 5, tmp_path) == [1, 2, 3, 4, 5]
    assert choose_cores("on", 4, tmp_path) == [1, 2, 3, 4]
    allow(0, 1, 4, 5)
    assert choose_cores("on", 2, tmp_path) == [0, 1]
    assert choose_cores("on", 4, tmp_path) == [0, 1, 4, 5]


def test_more_threads_than_cores_cannot_be_pinned(allow, tmp_path):
    allow(2, 3)
    with pytest.raises(ModelError, match=r"--cpu-pinning on: 3 threads .* the 2 .* give --threads 2 or fewer"):
        choose_cores("on", 3, tmp_path)
    with pytest.raises(ModelError, match="--cpu-pinning sometimes: must be one of auto, on, off"):
        choose_cores("sometimes", 2, tmp_path)


@pytest.mark.parametrize("pinning", ["on", "off"])
def test_threads_of_a_backend_stay_on_their_cores(cpu_library, tiny_model, worker_config, pinning):
    """All but the caller's, which is not the backend's."""
    allowed = os.sched_getaffinity(0)
    num_threads = min(3, len(allowed))
    chosen = choose_cores("on", num_threads)
    assert chosen is not None
    others = chosen[1:]
    before = threads()
    config = worker_config(tiny_model("llama").path, backend="cpu", num_threads=num_threads, cpu_pinning=pinning)
    backend = load_backend(config)
    expected = [{core} if pinning == "on" else allowed for core in sorted(others)]
    # A thread goes to its core when it first runs; one more takes the KV cache's memory, and ends.
    wait_until(lambda: cores_of(threads() - before) == expected)
    assert os.sched_getaffinity(0) == allowed
    assert backend.facts.num_threads == num_threads


def test_the_other_backend_does_not_pin(tiny_model, worker_config):
    with pytest.raises(ModelError, match="--cpu-pinning on: is not for the reference backend"):
        load_backend(worker_config(tiny_model("llama").path, backend="reference", cpu_pinning="on"))


def cores_of(some):
    found = []
    for thread in some:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.append(os.sched_getaffinity(thread))
    return sorted(found, key=min)


def threads():
    return {int(thread) for thread in os.listdir("/proc/self/task")}
