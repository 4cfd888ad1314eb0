"""Predicted times to first token against simulated ones, for bursts of prompts that are cached, shared or continued,
and deadlines that leave twice the time that is needed. Time is virtual, so the figures never change."""

import random
from dataclasses import dataclass
from statistics import median

import pytest

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.simulation.simulation import Outcome
from penstock.scheduler.testing.simulation import StepSeconds, checked_simulation, cpu_step_s
from penstock.scheduler.timing.step_time import StepWork
from penstock.scheduler.worker_config import MeasuredStep, WorkerFacts

BLOCK_SIZE = 16
KINDS = ("none", "cached", "shared", "continued")
PREFIX = 1 << 28
"""Token ids of prefixes; those of prompts are the numbers of requests."""


def large_step_s(work: StepWork) -> float:
    """About what a model of 0.6B takes on two cores."""
    return 1e-3 * (
        40
        + 1.2 * work.prefill_tokens
        + 3e-4 * work.prefill_kv
        + 0.9 * work.decodes
        + 0.006 * work.decode_kv
        + 1.5 * work.chunks
        + 0.002 * work.chunk_kv
        + 0.05 * work.copied_blocks
    )


@dataclass(frozen=True)
class Model:
    step_s: StepSeconds
    budget: int


MODELS = {"small": Model(cpu_step_s, 2048), "large": Model(large_step_s, 256)}
SHORTEST, LONGEST = 300, 600
"""Prompts, in tokens."""


def new_simulation(model="small", num_blocks=200_000, num_host_blocks=0, **config):
    rng = random.Random(f"{model} {config}")
    step_s = MODELS[model].step_s
    measured = [MeasuredStep(*step, 0) for step in ((0, 128, 0), (128, 144, 0), (0, 0, 1), (0, 0, 16))]
    facts = WorkerFacts(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=1 << 30,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=MODELS[model].budget,
        architecture="",
        backend="",
        device="",
        dtype="",
        kv_cache_dtype="",
        weight_bytes=0,
        kv_bytes=0,
        num_host_blocks=num_host_blocks,
        copy_us_per_block=50.0,
        measured_steps=tuple(
            MeasuredStep(step.start, step.end, step.decodes, round(1e6 * step_s(StepWork.measured(step))))
            for step in measured
        ),
    )
    return checked_simulation(facts, SchedulerConfig(**config), lambda work: step_s(work) * rng.lognormvariate(0, 0.05))


def burst(simulation, kind, size, seed=0, *, within_s=None, n=1, num_priorities=1, num_tenants=1) -> list[Outcome]:
    """A burst that arrives within 50 ms, once all that it may find is cached; returns it when it is over."""
    rng = random.Random(f"{kind} {seed}")
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(size)]
    histories: list[list[int]] = [[]] * size
    if kind in ("cached", "continued"):
        tenants = [str(number % num_tenants) for number in range(size)]
        now = simulation.now
        first = [
            simulation.ask(now + 0.001 * number, lengths[number], 8, tenant=tenants[number]) for number in range(size)
        ]
        simulation.run()
        histories = [
            outcome.request.prompt_token_ids[:-1] if kind == "cached" else outcome.finished.context.token_ids
            for outcome in first
        ]
        lengths = [1 if kind == "cached" else 20] * size
    elif kind == "shared":
        histories = [[PREFIX + seed] * SHORTEST] * size
        lengths = [rng.randint(5, 100) for _ in range(size)]
    now = simulation.now + 1.0
    outcomes = [
        simulation.ask(
            now + 0.05 * number / size,
            lengths[number],
            8,
            history=histories[number],
            n=n,
            within_s=within_s,
            priority=number % num_priorities,
            tenant=str(number % num_tenants),
        )
        for number in range(size)
    ]
    simulation.run()
    return outcomes


def ratios(outcomes):
    """Predicted times to first token over what they were."""
    return [outcome.accepted.predicted_ttft_s / outcome.ttft_s for outcome in outcomes if outcome.accepted]


def median_error(outcomes):
    return median(abs(ratio - 1) for ratio in ratios(outcomes))


def longest(outcomes):
    return max(outcome.ended_at - outcome.request.arrival for outcome in outcomes)


def check_burst(simulation, kind, size, most=0.5, factor=2.0, **fields):
    """A burst is predicted well, and the same again, with a deadline of twice the time, is not refused."""
    outcomes = burst(simulation, kind, size, seed=2, **fields)
    assert all(outcome.is_good for outcome in outcomes)
    assert median_error(outcomes) <= most
    again = burst(simulation, kind, size, seed=3, within_s=factor * longest(outcomes), **fields)
    assert not [outcome.refused for outcome in again if outcome.refused]
    assert all(outcome.is_good for outcome in again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("model", MODELS)
def test_bursts(model, size, kind):
    simulation = new_simulation(model)
    burst(simulation, "none", 16)
    check_burst(simulation, kind, size, most=0.4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [Policy.PRIORITY, Policy.DEADLINE, Policy.FAIR])
def test_bursts_under_other_policies(policy, kind):
    simulation = new_simulation(policy=policy, num_blocks=200_000)
    burst(simulation, "none", 16)
    check_burst(simulation, kind, 64, most=0.6, num_tenants=3 if policy is Policy.FAIR else 1, num_priorities=3)


@pytest.mark.parametrize("kind", ["cached", "shared"])
def test_a_burst_of_1024(kind):
    simulation = new_simulation(max_queued_tokens=1 << 40)
    burst(simulation, "none", 64)
    check_burst(simulation, kind, 1024, most=0.6)


@pytest.mark.parametrize("kind", ["cached", "shared"])
def test_requests_with_several_choices(kind):
    simulation = new_simulation()
    burst(simulation, "none", 16)
    check_burst(simulation, kind, 32, n=4, factor=2.5)


def test_prompts_that_are_copied_back_from_host_memory():
    """All of them have to be: the device has room for few."""
    simulation = new_simulation(num_blocks=1000, num_host_blocks=20_000)
    burst(simulation, "none", 16)
    outcomes = burst(simulation, "cached", 64, seed=2)
    assert simulation.scheduler.kv.num_restored_tokens > 10_000
    assert median_error(outcomes) <= 0.5


def test_what_waits_behind_a_request_does_not_count():
    """What waits with a lower priority is not counted, however much it is."""
    simulation = new_simulation("large", policy=Policy.PRIORITY)
    cached = burst(simulation, "none", 32)
    now = simulation.now + 1.0
    later = [simulation.ask(now + 0.001 * number, SHORTEST, 8, priority=1) for number in range(64)]
    sooner = [
        simulation.ask(now + 0.0005 + 0.001 * number, 1, 8, priority=0, history=outcome.request.prompt_token_ids[:-1])
        for number, outcome in enumerate(cached)
    ]
    simulation.run()
    assert median_error(sooner) <= 0.6
    assert median(outcome.ttft_s for outcome in sooner) < 0.2 * median(outcome.ttft_s for outcome in later)


# What waiting requests lack, as the cache changes ---------------------------------------------------------------------


def waiting_tokens(simulation):
    return simulation.scheduler._planner.waiting.work.tokens


@pytest.fixture
def queue():
    """Eight requests with cached prompts of 640 tokens, a shared one among them, wait behind one that runs."""
    simulation = new_simulation(max_num_seqs=1, num_blocks=1000)
    first = [simulation.ask(0.1 * number, 640, 2) for number in range(4)]
    simulation.run()
    simulation.ask(simulation.now, 16, 100)
    for outcome in [*first, *first]:
        simulation.ask(simulation.now + 0.01, 1, 2, history=outcome.request.prompt_token_ids[:-1])
    simulation.run(simulation.now + 0.02)
    assert len(simulation.scheduler.waiting) == 8
    return simulation


def test_waiting_requests_lack_what_is_not_cached(queue):
    assert waiting_tokens(queue) == 8 * BLOCK_SIZE


def test_what_is_forgotten_counts_again_and_once_for_all_that_share_it(queue):
    queue.scheduler.kv.flush()
    assert waiting_tokens(queue) == 4 * 624 + 8 * BLOCK_SIZE
    for number in range(5, 9):  # those that were counted for the others too
        queue.scheduler.abort(str(number), EngineFinishReason.CANCELLED)
    assert waiting_tokens(queue) == 4 * 624 + 4 * BLOCK_SIZE
    outcomes = queue.outcomes[9:]
    queue.run()
    assert all(outcome.is_good for outcome in outcomes)
    assert waiting_tokens(queue) == 0


def test_what_is_evicted_counts_again(queue):
    """Another request takes most blocks, before all others."""
    pool = queue.scheduler.kv.pool
    taken = pool.take_blocks(pool.num_free - 40)
    assert waiting_tokens(queue) == 3 * 624 + 8 * BLOCK_SIZE
    pool.release(taken)
    queue.run()
    assert waiting_tokens(queue) == 0


def test_what_a_worker_took_with_it_counts_again(queue):
    queue.scheduler.recover(blames_step=False)
    assert waiting_tokens(queue) > 4 * 624 + 8 * BLOCK_SIZE


def test_a_prefix_counts_for_the_first_and_not_for_those_that_find_it():
    simulation = new_simulation(max_num_seqs=1)
    simulation.ask(0.0, 16, 100)
    prefix = [PREFIX] * 640
    for number in range(5):
        simulation.ask(0.01 + 0.001 * number, 10, 2, history=prefix)
    simulation.run(0.05)
    assert waiting_tokens(simulation) == 640 + 5 * 10
    simulation.run()
    assert waiting_tokens(simulation) == 0


def test_a_preempted_row_lacks_what_was_not_kept():
    simulation = new_simulation(num_blocks=60, policy=Policy.PRIORITY)
    simulation.ask(0.0, 320, 300, priority=1)
    simulation.run(0.1)
    simulation.ask(simulation.now, 640, 2)
    while not simulation.scheduler.counters.preemptions:
        simulation.run(simulation.now + 0.001)
    # 20 blocks and the output's are kept as long as there is room: 40 blocks are the other one's.
    assert 0 < waiting_tokens(simulation) < 3 * BLOCK_SIZE + 320
    simulation.run()
    assert all(outcome.is_good for outcome in simulation.outcomes)
