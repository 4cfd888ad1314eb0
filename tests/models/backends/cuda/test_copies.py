"""Copies to and from a device that is busy. Without a GPU, fakes stand in for the copies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda.steps.features import DeviceFeatures
from penstock.models.backends.torch_common.device import copy_to
from penstock.models.batch.batch import build_batch
from penstock.models.batch.rows import RowTable
from penstock.scheduler.plan import AddedRow, Chunk, Pooling, SamplingParams, StepPlan

GPU = torch.device("cuda")


@pytest.fixture
def copies(monkeypatch):
    """The sources of copies to a GPU. Each is pinned, and nothing waits for it."""
    pinned, copies = [], []

    def pin(source):
        pinned.append(source.clone())
        return pinned[-1]

    def to(source, device, non_blocking=False):
        assert any(source is each for each in pinned), "a copy of memory that is not pinned waits for the device"
        assert non_blocking
        assert device == GPU
        copies.append(source)
        return source

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return copies


@pytest.mark.parametrize("values", [np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(1, np.float32), [7, 2], []])
def test_a_copy_to_a_gpu_does_not_wait_for_it(values, copies):
    copied = copy_to(GPU, values)
    assert copied is copies[0]
    assert copied.dtype == torch.from_numpy(np.asarray(values, getattr(values, "dtype", np.int64))).dtype
    np.testing.assert_array_equal(copied.numpy(), values)


def test_a_copy_in_host_memory_has_memory_of_its_own():
    values = np.arange(3)
    copied = copy_to(torch.device("cpu"), values)
    values[:] = 0
    assert copied.tolist() == [0, 1, 2]


def test_features_are_selected_without_waiting_for_the_gpu(copies):
    """The ids are on the host, and the features on the device."""
    tensor: Any = SimpleNamespace(device=GPU, index_select=lambda axis, ids: torch.ones(len(ids), 4))
    assert len(DeviceFeatures(tensor, 8)[[3, 1]]) == 2
    assert copies[0].tolist() == [3, 1]


@torch.inference_mode()
def test_vectors_and_prompt_logprobs_are_read_when_a_step_is_finished(tiny_model, worker_config, monkeypatch):
    """Reading them waits for the device. If they were read when the step is started, no other step could start."""
    config = worker_config(tiny_model("qwen3").path, backend="cuda", device="cpu", num_blocks=2, max_model_len=16)
    backend: Any = load_backend(config)
    ids = [3, 9, 1]
    prompt = AddedRow(0, 1, ids, len(ids), 0, [0], SamplingParams(temperature=0.0, prompt_logprobs=2))
    pooled = AddedRow(1, 1, ids, len(ids), 0, [1], SamplingParams(), pooling=Pooling.MEAN)
    plan = StepPlan(0, [], [prompt, pooled], [], [Chunk(0, 0, len(ids)), Chunk(1, 0, len(ids))], [])

    def run() -> Any:
        table = RowTable(backend.facts.num_blocks, backend.facts.block_size, backend.facts.hidden_size)
        table.apply(plan)
        [part] = backend.start_step(build_batch(table, plan, {}))().prompt_logprobs
        vector = table[1].pooled
        assert vector is not None
        return part.logprobs, vector.total.tolist()

    expected = run()
    assert len(expected[0].chosen) == len(ids) - 1
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(tensor: torch.Tensor) -> Any:
        """A copy that arrives when the step's last one is waited for."""
        copies.append((torch.zeros_like(tensor), tensor.clone()))
        return copies[-1][0], SimpleNamespace(synchronize=lambda: [host.copy_(made) for host, made in copies])

    monkeypatch.setattr(backend, "_to_host", to_host)
    assert run() == expected
