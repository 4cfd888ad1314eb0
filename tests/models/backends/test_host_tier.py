"""KV that was evicted to host memory, on the reference backend: it returns bit for bit, and no output changes by it."""

import asyncio
import math
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.models.backends.torch_common import host_pages
from penstock.models.backends.torch_common.host_pages import HostPages
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.plan import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 24
TIGHT = {"num_blocks": 16, "max_model_len": 200, "host_kv_cache_bytes": 1 << 20}
"""Room for two or three of the prompts, and slots for all of them."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def copies_are_free(monkeypatch):
    """What little a tiny model computes may take no longer than copies; that is not what is tested here."""
    monkeypatch.setattr(HostPages, "measure_copy_us", lambda pages: 0.0)


def content(executor, block_ids):
    """The bits of blocks."""
    return [blocks[block_ids].cpu().clone() for blocks in executor._runner._backend._pages.by_block]


@pytest.mark.parametrize("num_slots", [0, 1, 300, 5000])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_pinned_memory_is_not_rounded_up_by_much(num_slots, heads, monkeypatch):
    """torch rounds each pinned allocation up to a power of two."""
    pinned_bytes = 0

    def empty(shape, dtype, pin_memory):
        nonlocal pinned_bytes
        assert pin_memory
        pinned_bytes += 1 << (math.prod(shape) * dtype.itemsize - 1).bit_length()
        return torch.zeros(1, dtype=dtype).expand(shape)

    monkeypatch.setattr(torch, "empty", empty)
    pages: Any = SimpleNamespace(
        shape=torch.Size([7, 2, heads, 16, 128]),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        element_size=lambda: 2,
    )
    slots = host_pages.HostSlots(num_slots, pages)
    wanted_bytes = num_slots * heads * 2 * 16 * 128 * 2
    assert wanted_bytes <= pinned_bytes <= wanted_bytes * 1.02 + (16 << 20)
    assert all(slots[slot].shape == pages.shape[1:] for slot in range(num_slots))


def test_slots_hold_one_block_each():
    pages = torch.arange(40.0).view(10, 2, 2)
    slots = host_pages.HostSlots(10, pages)
    for slot in range(10):
        slots[slot].copy_(pages[slot])
    assert all(slots[slot].equal(pages[slot]) for slot in range(10))


@pytest.mark.usefixtures("copies_are_free")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_evicted_prefix_returns_byte_equal(tiny_model, in_process, start_engine, prompts, dtype, device):
    executor = in_process(tiny_model("llama").path, **TIGHT, dtype=dtype, device=device)
    engine = await start_engine(executor)
    subject = prompts[-1]
    [first] = await engine.run([subject], GREEDY, NUM_TOKENS)
    kv = engine.engine._scheduler.kv
    hashes = first.finished.context.block_hashes[:4]
    before = [kv.pool.find(block_hash) for block_hash in hashes]
    written = content(executor, before)
    await engine.run(prompts[2:7] * 2, GREEDY, NUM_TOKENS)
    assert all(kv.pool.find(block_hash) is None for block_hash in hashes), "it is still on the device"
    assert not written[0].equal(content(executor, before)[0]), "nobody else had its blocks"
    num_restored = engine.stats.restored_tokens

    [again] = await engine.run([subject], GREEDY, NUM_TOKENS)
    assert again.finished.usage.cached_tokens == 64
    assert engine.stats.restored_tokens == num_restored + 64
    after = [kv.pool.find(block_hash) for block_hash in hashes]
    assert all(one.equal(other) for one, other in zip(written, content(executor, after), strict=True))
    if dtype == "float32":  # in which chunks the rest is computed changes the last bits of bfloat16
        assert again.token_ids == first.token_ids


@pytest.mark.usefixtures("copies_are_free")
@pytest.mark.parametrize("device", DEVICES)
async def test_outputs_are_those_of_a_cache_that_has_room(typical_model, in_process, start_engine, prompts, device):
    path = typical_model.path
    plain = await start_engine(in_process(path, device=device), enable_prefix_caching=False)
    expected = [answer.token_ids for answer in await plain.run(prompts, GREEDY, NUM_TOKENS)]
    executor = in_process(path, **TIGHT, device=device)
    engine = await start_engine(executor)
    for _ in range(3):
        assert [answer.token_ids for answer in await engine.run(prompts, GREEDY, NUM_TOKENS)] == expected
    assert engine.stats.preemptions > 0
    assert engine.stats.restored_tokens > 0
    assert any(plan.copies_out and plan.copies_in for plan in executor.plans)


async def test_with_the_worker_its_slots_are_gone(tiny_model, worker_config, start_engine, prompts):
    worker = WorkerProcess(worker_config(tiny_model("llama").path, **TIGHT))
    engine = await start_engine(worker)
    expected = [answer.token_ids for answer in await engine.run(prompts, GREEDY, NUM_TOKENS)]
    held = engine.stats.host_blocks
    assert held > 0
    os.kill(worker.pid, signal.SIGKILL)
    for state in (EngineState.RECOVERING, EngineState.SERVING):
        async with asyncio.timeout(120):
            while engine.engine.state is not state:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
        assert engine.stats.host_blocks == 0
    [again] = await engine.run([prompts[-1]], GREEDY, NUM_TOKENS)
    assert again.finished.usage.cached_tokens == 0
    assert again.token_ids == expected[-1]
    assert [answer.token_ids for answer in await engine.run(prompts, GREEDY, NUM_TOKENS)] == expected


async def test_a_block_that_is_not_worth_its_copy_is_computed_again(
    tiny_model, in_process, start_engine, prompts, monkeypatch
):
    monkeypatch.setattr(HostPages, "measure_copy_us", lambda pages: 1e9)
    executor = in_process(tiny_model("llama").path, **TIGHT)
    engine = await start_engine(executor)
    answers = [await engine.run(prompts, GREEDY, NUM_TOKENS) for _ in range(2)]
    assert [answer.token_ids for answer in answers[0]] == [answer.token_ids for answer in answers[1]]
    assert engine.stats.host_blocks > 0
    assert engine.stats.restored_tokens == 0
