"""No row reads KV that another one wrote: the fake worker checks every read, and finds planted bugs."""

import asyncio
import random
from contextlib import suppress

import pytest
from known_requests import ENGINE_VOCAB_SIZE

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.prefill_adder import PrefillAdder
from penstock.scheduler.request import EngineFinishReason, Refused
from penstock.scheduler.testing.fake_executor import FakeExecutor


async def run_load(engine, submit, seed):
    """Requests that share prefixes, in a pool that is too small for them; some are cancelled."""
    rng = random.Random(seed)
    requests = []
    for number in range(60):
        sampling = SamplingParams(seed=number, logprobs=rng.choice((None, 1)))
        received = submit(
            engine,
            str(number),
            rng.randint(1, 120),
            first=rng.choice((0, 0, 50)),
            max_tokens=rng.randint(1, 60),
            n=rng.choice((1, 1, 2)),
            sampling=sampling,
        )
        requests.append(received)
        if rng.random() < 0.2:
            engine.abort(str(rng.randrange(number + 1)), EngineFinishReason.CANCELLED)
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
    await engine.wait_idle()
    return requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_state_slots", [0, 5])
async def test_reliability_figure_2_no_row_reads_what_another_wrote(submit, seed, num_state_slots):
    """The fake worker knows whose KV or state each slot holds, poisons what is given out again, and checks every
    read."""
    executor = FakeExecutor(num_blocks=20, vocab_size=ENGINE_VOCAB_SIZE, num_state_slots=num_state_slots)
    engine = Engine(executor, SchedulerConfig(max_num_batched_tokens=64))
    await engine.start()
    for received in await run_load(engine, submit, seed):
        received.check_end()
        assert received.finished.reason is not EngineFinishReason.INTERNAL
    assert engine.stats().preemptions > 0
    assert engine.stats().cached_tokens > 0
    assert engine.stats().kv_usage == 0.0
    await engine.stop()


def publish_before_the_plan_is_closed(patch):
    begin = PrefillAdder._begin

    def begin_and_publish(prefill_adder, plan, sequence, block_ids, prefix):
        begin(prefill_adder, plan, sequence, block_ids, prefix)
        num_full = len(sequence.token_ids) // prefill_adder._kv.block_size
        prefill_adder._kv.publish(block_ids, sequence.hashes, prefix.num_blocks, num_full, sequence.token_ids)

    patch.setattr(PrefillAdder, "_begin", begin_and_publish)


def free_a_block_too_early(patch):
    begin = PrefillAdder._begin

    def begin_and_free(prefill_adder, plan, sequence, block_ids, prefix):
        begin(prefill_adder, plan, sequence, block_ids, prefix)
        prefill_adder._kv.pool.release(sequence.block_ids[-1:])

    patch.setattr(PrefillAdder, "_begin", begin_and_free)


@pytest.mark.parametrize("plant", [publish_before_the_plan_is_closed, free_a_block_too_early])
async def test_reliability_figure_2_planted_bug_is_caught(submit, monkeypatch, caplog, plant):
    plant(monkeypatch)
    engine = Engine(
        FakeExecutor(num_blocks=20, vocab_size=ENGINE_VOCAB_SIZE), SchedulerConfig(max_num_batched_tokens=64)
    )
    await engine.start()
    with suppress(Refused):  # once the engine has failed
        await run_load(engine, submit, 0)
    assert engine.state is EngineState.FAILED
    assert "BrokenPlan" in caplog.text
    await engine.stop()
