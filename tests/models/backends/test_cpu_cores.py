"""Compute threads stay where the worker's configuration places them."""

import contextlib
import os

import pytest
from waiting import wait_until

from penstock.models.backends.base import load_backend
from penstock.models.errors import ModelError


@pytest.mark.parametrize("is_pinned", [True, False])
def test_threads_of_a_backend_stay_on_their_cores(cpu_library, tiny_model, worker_config, is_pinned):
    """All but the caller's, which is not the backend's."""
    allowed = os.sched_getaffinity(0)
    cpus = tuple((cpu,) for cpu in sorted(allowed)[:3]) if is_pinned else ()
    num_threads = len(cpus) or min(3, len(allowed))
    before = threads()
    path = tiny_model("llama").path
    backend = load_backend(worker_config(path, backend="cpu", num_threads=num_threads, thread_cpus=cpus))
    expected = [set(some) for some in cpus[1:]] if is_pinned else [allowed] * (num_threads - 1)
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
