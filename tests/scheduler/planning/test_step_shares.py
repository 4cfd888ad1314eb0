"""Shares of a step: under ``fair``, a tenant's rows and prompts prolong the steps of others only so far."""

from dataclasses import replace
from statistics import median

import pytest

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.simulation import checked_simulation, cpu_step_s
from penstock.scheduler.worker_config import WorkerFacts

FAIR = SchedulerConfig(policy=Policy.FAIR, max_num_seqs=128, max_num_batched_tokens=512)


@pytest.fixture
def new_simulation():
    """Also records the time of each step."""

    def new(config=FAIR, num_blocks=20_000):
        def step_s(work):
            step_times.append(cpu_step_s(work))
            return step_times[-1]

        step_times: list[float] = []
        rest = ("", "", "cpu", "", "", 0, 0)
        facts = WorkerFacts(num_blocks, 16, 1 << 30, 16_384, config.max_num_seqs, config.max_num_batched_tokens, *rest)
        return checked_simulation(facts, config, step_s), step_times

    return new


def long_rows(simulation, number=48, tenant="heavy", when=0.0):
    """Rows that share a long prompt and go on for long. 48 of them take 37 ms of a step, and more with every token."""
    history = [99_999] * 2000
    return [simulation.ask(when, 1, 12_000, tenant=tenant, history=history) for _ in range(number)]


def short_rows(simulation, number, tenant="light", when=3.0, max_tokens=400):
    return [simulation.ask(when, 16, max_tokens, tenant=tenant) for _ in range(number)]


def progress(outcomes, simulation, seconds):
    """How many tokens each gets in this time."""
    before = [outcome.num_tokens for outcome in outcomes]
    simulation.run(simulation.now + seconds)
    return [outcome.num_tokens - earlier for outcome, earlier in zip(outcomes, before, strict=True)]


def test_long_rows_of_one_tenant_do_not_slow_down_anothers(new_simulation):
    simulation, steps = new_simulation()
    heavy, light = long_rows(simulation), short_rows(simulation, 4)
    simulation.run(3.0)
    undivided = steps[-1]
    steps.clear()
    gained = progress(light, simulation, 2.0)
    assert undivided > 0.02
    assert median(steps) < 0.02, "its own rows, and what others may take"
    assert min(gained) >= len(steps) - 4, "they are in every step"
    assert all(outcome.finished is None for outcome in heavy)


def test_rows_of_a_tenant_sit_out_by_turns(new_simulation):
    simulation, _ = new_simulation()
    heavy = long_rows(simulation)
    short_rows(simulation, 2)
    simulation.run(3.5)
    gained = progress(heavy, simulation, 2.0)
    assert min(gained) > 0
    assert max(gained) - min(gained) <= 2


def test_no_row_sits_out_for_a_tenant_that_does_not_decode(new_simulation):
    simulation, _ = new_simulation()
    heavy = long_rows(simulation)
    light = short_rows(simulation, 2, max_tokens=40)
    simulation.run(2.5)
    before = progress(heavy, simulation, 0.5)
    simulation.run(9.0)
    assert all(outcome.finished for outcome in light)
    after = progress(heavy, simulation, 0.5)
    assert min(after) >= 0.75 * min(before), "their histories have grown meanwhile"


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.PRIORITY, Policy.DEADLINE])
def test_other_policies_share_no_steps(new_simulation, policy):
    simulation, steps = new_simulation(replace(FAIR, policy=policy))
    heavy = long_rows(simulation)
    short_rows(simulation, 2)
    simulation.run(3.5)
    steps.clear()
    gained = progress(heavy, simulation, 1.0)
    assert min(gained) >= len(steps) - 1


def test_a_step_is_shared_by_weight(new_simulation):
    def gained_with(weight):
        simulation, _ = new_simulation(replace(FAIR, tenants={"heavy": TenantLimits(weight=weight)}))
        heavy = long_rows(simulation)
        long_rows(simulation, 16, tenant="light", when=3.0)
        simulation.run(6.0)
        return sum(progress(heavy, simulation, 2.0))

    assert gained_with(1.0) < 0.8 * gained_with(3.0)


def test_equal_tenants_have_equal_parts(new_simulation):
    simulation, _ = new_simulation()
    tenants = [long_rows(simulation, number, tenant=str(number)) for number in (40, 20)]
    simulation.run(5.0)
    few, many = (sum(progress(outcomes, simulation, 2.0)) for outcomes in reversed(tenants))
    assert many < 1.2 * few


def test_long_prompts_of_one_tenant_do_not_slow_down_anothers_tokens(new_simulation):
    simulation, steps = new_simulation()
    light = short_rows(simulation, 4, when=0.0, max_tokens=4000)
    simulation.run(2.0)
    prompts = [simulation.ask(2.0, 3000, 4, tenant="heavy") for _ in range(20)]
    simulation.run(2.5)
    steps.clear()
    gained = progress(light, simulation, 2.0)
    assert max(steps) < 0.02
    assert min(gained) >= len(steps) - 1
    assert sum(outcome.num_computed for outcome in prompts) > 1000, "they do go on"


def test_a_prompt_goes_on_beside_its_tenants_rows(new_simulation):
    simulation, _ = new_simulation()
    long_rows(simulation)
    short_rows(simulation, 2, max_tokens=4000)
    simulation.run(4.0)
    late = simulation.ask(4.0, 200, 2, tenant="heavy")
    simulation.run(8.0)
    assert late.ttft_s is not None


def test_a_prompt_does_not_wait_for_those_of_a_tenant_that_has_its_share(new_simulation):
    simulation, _ = new_simulation()
    short_rows(simulation, 4, tenant="third", when=0.0, max_tokens=4000)
    for _ in range(100):
        simulation.ask(1.0, 3000, 4, tenant="heavy")
    simulation.run(4.0)
    light = [simulation.ask(4.0 + number / 10, 100, 4, tenant="light") for number in range(20)]
    simulation.run(7.0)
    assert max(outcome.ttft_s for outcome in light) < 0.3


def test_a_tenant_is_served_while_anothers_streams_hold_most_blocks(new_simulation):
    """Preempted rows of the heavy tenant come back, with long histories to compute again."""
    simulation, _ = new_simulation(num_blocks=900)
    heavy = long_rows(simulation, 40)
    light = [simulation.ask(2 + number / 40, 36, 32, tenant="light") for number in range(1200)]
    simulation.run(32.5)
    assert sum(outcome.finished is not None for outcome in light) >= 1170
    assert max(outcome.ttft_s for outcome in light if outcome.ttft_s is not None) < 1.0
    assert simulation.scheduler.counters.preemptions > 0
    assert all(outcome.finished is None for outcome in heavy)
