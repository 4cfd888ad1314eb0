"""How much memory there is for weights and KV, and what to say when it is too little. Knows no model family."""

import psutil
import torch

from penstock.models.errors import ModelError
from penstock.models.spec import ModelSpec
from penstock.scheduler.plan import WorkerConfig


def free_bytes(device: torch.device, max_memory_bytes: int | None) -> int:
    """What can still be allocated on the device; on a CPU, what is left of ``max_memory_bytes`` too."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = psutil.virtual_memory().available
    if max_memory_bytes is None:
        return available
    return min(available, max(0, max_memory_bytes - psutil.Process().memory_info().rss))


def check_weights_fit(config: WorkerConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError unless the weights fit in what is free now."""
    need, free = spec.num_parameters * dtype.itemsize, free_bytes(device, config.max_memory_bytes)
    if need > free:
        raise ModelError(
            f"{spec.architecture}: its weights need {_gib(need)} as {_name(dtype)}, and {device} has {_gib(free)} free"
            ": choose a smaller --dtype or a smaller model"
        )


def num_kv_blocks(
    config: WorkerConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> int:
    """How many KV blocks to make, weights already loaded. Raises ModelError if one request of full length does not
    fit."""
    block_bytes = spec.kv_bytes_per_token(dtype.itemsize) * config.block_size
    free = free_bytes(device, config.max_memory_bytes)
    if config.kv_cache_bytes is None:
        budget, flag = int(free * config.memory_utilization), "--gpu-memory-utilization"
    else:
        budget, flag = config.kv_cache_bytes, "--kv-cache-memory-bytes"
        if budget > free:
            raise ModelError(f"{flag} {budget}: {device} has {_gib(free)} free after the weights: give less")
    # One page besides stands for positions that no row has.
    blocks = budget // block_bytes - 1
    needed = -(-max_model_len // config.block_size)
    if blocks < needed:
        shorter = f", or lower --max-model-len to at most {blocks * config.block_size}" if blocks > 0 else ""
        raise ModelError(
            f"{flag} leaves {_gib(budget)} for the KV cache, and one request of {max_model_len} tokens needs "
            f"{_gib((needed + 1) * block_bytes)}: raise {flag}{shorter}"
        )
    return blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.2f} MiB"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
