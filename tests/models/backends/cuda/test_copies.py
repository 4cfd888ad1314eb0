"""Copies to a device that is busy. Without a GPU, torch's copies are fakes that check what they are given."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.models.backends.cuda.steps.features import DeviceFeatures
from penstock.models.backends.torch_common.device import copy_to

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
