"""Computes the memory left for weights and KV. Imports no tensor library unless the device is a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from penstock.kv.block_groups import BlockGroups
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import WorkerConfig


@contextmanager
def allocated(num_blocks: int, device: object) -> Iterator[None]:
    """Wraps the allocation of the KV cache. Raises ModelError if memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        raise ModelError(
            f"the KV cache of {num_blocks} blocks cannot be allocated on {device}: lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes or --max-model-len"
        ) from error


def free_bytes(device: str, max_memory_bytes: int | None, num_ranks: int) -> int:
    """Returns what can still be allocated on the device. On a CPU this is an equal part for each of ``num_ranks``,
    limited by what is left of the rank's own ``max_memory_bytes``."""
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
    """Raises ModelError unless ``weight_bytes`` of ``dtype`` fit in what is free before any rank has loaded."""
    free = _free_bytes_everywhere(config, parallel)
    if weight_bytes > free:
        smaller = "--quantization int8 or int4, " if config.device == "cpu" else ""
        raise ModelError(
            f"{architecture}: its weights need {_gib(weight_bytes)} as {dtype}, and {config.device} has {_gib(free)} "
            f"free: choose {smaller}a smaller --dtype or a smaller model"
        )


def check_adapters_fit(config: WorkerConfig, num_bytes: int) -> None:
    """Raises ModelError unless the slots of LoRA adapters fit in what is free after the weights."""
    free = free_bytes(config.device, config.max_memory_bytes, 1)
    if num_bytes > free:
        raise ModelError(
            f"--max-loras {config.max_loras}: with --max-lora-rank {config.max_lora_rank} the adapters need "
            f"{_gib(num_bytes)}, and {config.device} has {_gib(free)} free after the weights: lower one of the two"
        )


SHORTEST_CONTEXT = 1024
"""The shortest context, in tokens, that a service has by itself, if the model's own is not shorter."""


SNAPSHOT_TOKENS = 1024
"""A model with recurrent layers has room to save a state for this many tokens of KV: a conversation or two."""


class CacheSizes(NamedTuple):
    """What a worker allocates for its rows."""

    num_blocks: int
    num_state_slots: int


def num_kv_blocks(
    config: WorkerConfig, block_bytes: int, max_model_len: int, num_spare: int = 0, parallel: TensorParallel = ALONE
) -> int:
    """Returns the number of KV blocks of a model without recurrent layers; see ``cache_sizes``."""
    return cache_sizes(config, block_bytes, 0, max_model_len, num_spare, parallel).num_blocks


def cache_sizes(
    config: WorkerConfig,
    block_bytes: int,
    state_bytes: int,
    max_model_len: int,
    num_spare: int = 0,
    parallel: TensorParallel = ALONE,
    groups: BlockGroups | None = None,
) -> CacheSizes:
    """Returns how many KV blocks of ``block_bytes`` to allocate besides ``num_spare``, and how many slots for recurrent
    states of ``state_bytes``, once the weights are loaded; the same on every rank. ``groups`` are those of the layers;
    None: there is one. Raises ModelError if the requested memory is not free, or a request of full length does not fit:
    where ``--max-model-len`` is not given, one of SHORTEST_CONTEXT (see ``base.context_of``).

    States take at most half of the budget: a slot for each of ``--max-num-seqs`` rows, then one for each
    SNAPSHOT_TOKENS of the KV that the rest holds.
    """
    block_bytes += config.block_bytes_beside
    groups = groups or BlockGroups(0, 1, config.block_size, 1)
    snapshot_blocks = max(1, SNAPSHOT_TOKENS // config.block_size)
    free = _free_bytes_everywhere(config, parallel)
    flag = "--kv-cache-memory-bytes"
    if config.num_blocks is not None:
        num_slots = config.max_num_seqs + config.num_blocks // snapshot_blocks if state_bytes else 0
        budget = (config.num_blocks + num_spare) * block_bytes + num_slots * state_bytes
    elif config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        budget, flag = int(free * config.memory_utilization), "--gpu-memory-utilization"
    if budget > free:
        raise ModelError(f"{flag} {budget}: {config.device} has {_gib(free)} free after the weights: give less")
    if config.num_blocks is not None:
        return CacheSizes(config.num_blocks, num_slots)
    least = max_model_len if config.max_model_len is not None else min(max_model_len, SHORTEST_CONTEXT)
    needed = groups.num_blocks_for(least) + num_spare
    num_slots = 0
    if state_bytes:
        most = max(1, min(budget // 2, budget - needed * block_bytes) // state_bytes)
        live = min(config.max_num_seqs, most)
        saved = (budget - live * state_bytes) // (state_bytes + snapshot_blocks * block_bytes)
        num_slots = min(live + max(0, saved), most)
    blocks = (budget - num_slots * state_bytes) // block_bytes - num_spare
    if blocks < needed - num_spare:
        shorter = f", or lower --max-model-len to at most {groups.longest(blocks)}" if blocks > 0 else ""
        raise ModelError(
            f"{flag} leaves {_gib(budget)} for the KV cache, and one request of {least} tokens needs "
            f"{_gib(needed * block_bytes + state_bytes)}: raise {flag}{shorter}"
        )
    return CacheSizes(blocks, num_slots)


def _free_bytes_everywhere(config: WorkerConfig, parallel: TensorParallel) -> int:
    """Returns the free bytes of the rank with the least. All measure before any continues and allocates more."""
    return parallel.least(free_bytes(config.device, config.max_memory_bytes, parallel.size))


def num_host_blocks(config: WorkerConfig, block_bytes: int, kv_bytes: int) -> int:
    """Returns how many slots of ``block_bytes`` the host tier has. ``kv_bytes`` is the size of the device's pages,
    which may not be allocated yet if the device is the host. Raises ModelError if the memory is not free."""
    wanted = config.host_kv_cache_bytes
    if not wanted:
        return 0
    flag = f"--host-kv-cache-bytes {wanted}"
    free = free_bytes("cpu", config.max_memory_bytes, config.tensor_parallel_size) - (
        kv_bytes if config.device == "cpu" else 0
    )
    if wanted > free:
        raise ModelError(f"{flag}: the host has {_gib(max(0, free))} free besides weights and KV cache: give less")
    if wanted < block_bytes:
        raise ModelError(f"{flag}: a block needs {_gib(block_bytes)}: give more, or leave it out")
    return wanted // block_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 27 else f"{num_bytes / (1 << 20):.2f} MiB"
