"""How much memory there is for weights and KV, and what to say when it is too little. Knows no model family, and
imports no tensor library unless a GPU is asked."""

import psutil

from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.errors import ModelError
from penstock.scheduler.plan import WorkerConfig


def free_bytes(device: str, max_memory_bytes: int | None, num_ranks: int) -> int:
    """What can still be allocated on the device; on a CPU, which so many ranks share, an equal part of that, and what
    is left of the rank's own ``max_memory_bytes`` too."""
    if device.startswith("cuda"):
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = psutil.virtual_memory().available // num_ranks
    if max_memory_bytes is None:
        return available
    return min(available, max(0, max_memory_bytes - psutil.Process().memory_info().rss))


def check_weights_fit(
    config: WorkerConfig, architecture: str, weight_bytes: int, dtype: str, parallel: TensorParallel = ALONE
) -> None:
    """Raises ModelError unless weights of so many bytes fit in what is free now, before any rank has loaded; ``dtype``
    is what to call them."""
    free = _free_bytes_everywhere(config, parallel)
    if weight_bytes > free:
        smaller = "--quantization int8 or int4, " if config.device == "cpu" else ""
        raise ModelError(
            f"{architecture}: its weights need {_gib(weight_bytes)} as {dtype}, and {config.device} has {_gib(free)} "
            f"free: choose {smaller}a smaller --dtype or a smaller model"
        )


def num_kv_blocks(
    config: WorkerConfig,
    block_bytes: int,
    max_model_len: int,
    num_spare: int = 0,
    parallel: TensorParallel = ALONE,
) -> int:
    """How many KV blocks of ``block_bytes`` to make besides ``num_spare``, weights already loaded; the same on every
    rank. Raises ModelError if one request of full length does not fit, or what was asked for is not free."""
    block_bytes += config.block_bytes_beside
    free = _free_bytes_everywhere(config, parallel)
    flag = "--kv-cache-memory-bytes"
    if config.num_blocks is not None:
        budget = (config.num_blocks + num_spare) * block_bytes
    elif config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        budget, flag = int(free * config.memory_utilization), "--gpu-memory-utilization"
    if budget > free:
        raise ModelError(f"{flag} {budget}: {config.device} has {_gib(free)} free after the weights: give less")
    if config.num_blocks is not None:
        return config.num_blocks
    blocks = budget // block_bytes - num_spare
    needed = -(-max_model_len // config.block_size)
    if blocks < needed:
        shorter = f", or lower --max-model-len to at most {blocks * config.block_size}" if blocks > 0 else ""
        raise ModelError(
            f"{flag} leaves {_gib(budget)} for the KV cache, and one request of {max_model_len} tokens needs "
            f"{_gib((needed + num_spare) * block_bytes)}: raise {flag}{shorter}"
        )
    return blocks


def _free_bytes_everywhere(config: WorkerConfig, parallel: TensorParallel) -> int:
    """On the rank that has least. None goes on before all have looked, so nobody sees what another one takes next."""
    return parallel.least(free_bytes(config.device, config.max_memory_bytes, parallel.size))


def num_host_blocks(config: WorkerConfig, block_bytes: int, kv_bytes: int) -> int:
    """How many slots of ``block_bytes`` the host tier has. ``kv_bytes``: of the device's pages, which may not be taken
    from the system yet where the device is the host. Raises ModelError if so many bytes are not free."""
    wanted = config.host_kv_cache_bytes
    if not wanted:
        return 0
    flag = f"--host-kv-cache-bytes {wanted}"
    free = free_bytes("cpu", config.max_memory_bytes, config.tensor_parallel_size) - (
        kv_bytes if config.device == "cpu" else 0
    )
    if wanted > free:
        raise ModelError(f"{flag}: the host has {_gib(max(0, free))} free beside weights and KV cache: give less")
    if wanted < block_bytes:
        raise ModelError(f"{flag}: a block needs {_gib(block_bytes)}: give more, or leave it out")
    return wanted // block_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.2f} MiB"
