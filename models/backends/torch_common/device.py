"""Checks the device before a backend in torch loads a model, and copies arrays to it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.reference.onednn_amx import avoid_broken_tiles
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_dtype(config: WorkerConfig, info: CheckpointInfo) -> tuple[str, torch.dtype, torch.device]:
    """Returns the name and the dtype of the model's computation, and its device, ready for it. Raises ModelError."""
    name = info.dtype if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ModelError(f"--dtype {config.dtype}: must be auto or one of {', '.join(DTYPES)}")
    device = torch_device(config.device)
    if device.type == "cpu":
        avoid_broken_tiles()
    return name, DTYPES[name], device


def torch_device(name: str) -> torch.device:
    """Returns the device of that name. Raises ModelError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        if name.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None:
            raise ModelError(
                f"--device {name}: the installed torch {torch.__version__} is built without CUDA: install a CUDA build "
                "of torch (https://pytorch.org/get-started/locally), or give --device cpu"
            ) from error
        # torch's messages have many lines; the first names the problem.
        reason = str(error).splitlines()[0]
        raise ModelError(f"--device {name}: cannot be used ({reason}): choose cpu, or repair the driver") from error
    return device


def copy_to(device: torch.device, values: NDArray[Any] | Sequence[int]) -> Tensor:
    """Returns a copy of an array, or of int64 ids, on a device, without waiting for what the device computes. A copy of
    memory that is not pinned would wait."""
    source = torch.from_numpy(np.asarray(values, dtype=None if isinstance(values, np.ndarray) else np.int64))
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.clone()
