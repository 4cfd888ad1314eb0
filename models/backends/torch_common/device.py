"""What backends in torch ask of the device and the config before they load."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.models.checkpoint.spec import ModelSpec
from penstock.models.errors import ModelError
from penstock.scheduler.plan import WorkerConfig


def torch_device(name: str) -> torch.device:
    """The device of that name. Raises ModelError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        if name.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None:
            raise ModelError(
                f"--device {name}: the installed torch {torch.__version__} is built without CUDA: install a CUDA build "
                "of torch (https://pytorch.org/get-started/locally), or give --device cpu"
            ) from error
        # torch's texts run over many lines; the first says what is wrong.
        reason = str(error).splitlines()[0]
        raise ModelError(f"--device {name}: cannot be used ({reason}): choose cpu, or repair the driver") from error
    return device


def context_of(config: WorkerConfig, spec: ModelSpec) -> int:
    """Positions that a row may have. Raises ModelError if the model has fewer than are asked for."""
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ModelError(
            f"--max-model-len {max_model_len}: the model was made for {spec.max_positions}; give at most that"
        )
    return max_model_len


@contextmanager
def allocated(num_blocks: int, device: torch.device) -> Iterator[None]:
    """In which the KV cache is allocated. Raises ModelError for want of memory."""
    try:
        yield
    except RuntimeError as error:  # of torch's
        raise ModelError(
            f"the KV cache of {num_blocks} blocks cannot be allocated on {device}: lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes or --max-model-len"
        ) from error
