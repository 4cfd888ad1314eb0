"""Load in virtual time, with a worker whose steps take about what the demo model's do: overload, deadlines, fairness
between tenants, predictions, and what is changed while all that goes on."""

import random
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import RefusalKind
from penstock.scheduler.simulation.simulation import Outcome
from penstock.scheduler.testing.simulation import checked_simulation, cpu_step_s
from penstock.scheduler.worker_config import WorkerFacts

MAX_ROWS = 32
PLAIN = SchedulerConfig(max_num_seqs=MAX_ROWS, enable_prefix_caching=False, max_queued_requests=10_000)


@pytest.fixture
def new_simulation(request):
    def new(config=PLAIN, noise=0.1, slower=1.0):
        rng = random.Random(f"{request.node.name} steps")
        facts = WorkerFacts(
            num_blocks=20_000,
            block_size=16,
            vocab_size=1 << 30,
            max_model_len=16_384,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            architecture="",
            backend="",
            device="",
            dtype="",
            kv_cache_dtype="",
            weight_bytes=0,
            kv_bytes=0,
        )
        return checked_simulation(facts, config, lambda work: slower * cpu_step_s(work) * rng.lognormvariate(0, noise))

    return new


def arrive(simulation, rate, seconds, seed=0, **fields):
    """Requests at random times from now on."""
    rng = random.Random(seed)
    when, outcomes = simulation.now, []
    end = when + seconds
    while (when := when + rng.expovariate(rate)) < end:
        outcomes.append(simulation.ask(when, rng.randint(32, 512), rng.randint(16, 128), **fields))
    return outcomes


def capacity(new_simulation, config, seconds=10.0, slo_s=4.0):
    """What a closed loop gets done within the SLO, a second."""
    simulation = new_simulation(config)
    rng = random.Random(5)
    running: list[Outcome] = []
    while simulation.now < seconds:
        running = [outcome for outcome in running if outcome.ended_at is None]
        while len(running) < MAX_ROWS:
            outcome = simulation.ask(simulation.now, rng.randint(32, 512), rng.randint(16, 128), within_s=slo_s)
            running.append(outcome)
        simulation.run(simulation.now + 0.02)
    return sum(outcome.is_good for outcome in simulation.outcomes) / seconds


def predictions(outcomes):
    """Relative errors of the predicted times to first token."""
    return [
        abs(outcome.accepted.predicted_ttft_s / outcome.ttft_s - 1)
        for outcome in outcomes
        if outcome.accepted and outcome.accepted.predicted_ttft_s and outcome.ttft_s
    ]


# Overload -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy.FCFS, Policy.DEADLINE])
def test_reliability_figures_7_and_15_overload(new_simulation, policy):
    """Five times what can be done: as much is done as ever, nearly all that is admitted is in time, and what expires in
    the queue has cost nothing."""
    config = replace(PLAIN, policy=policy)
    possible = capacity(new_simulation, config)
    simulation = new_simulation(config)
    arrive(simulation, 0.5 * possible, 5.0, within_s=4.0)
    simulation.run(5.0)
    over = arrive(simulation, 5 * possible, 15.0, seed=1, within_s=4.0)
    simulation.run(20.0)
    goodput = sum(outcome.is_good for outcome in over) / 15.0
    after = arrive(simulation, 0.3 * possible, 10.0, seed=2, within_s=4.0)
    simulation.run()
    assert goodput >= 0.9 * possible
    admitted = [outcome for outcome in over if outcome.accepted]
    assert sum(outcome.is_good for outcome in admitted) >= 0.95 * len(admitted)
    refused = [outcome.refused for outcome in over if outcome.refused]
    assert {refusal.kind for refusal in refused} == {RefusalKind.OVERLOADED}
    assert all(refusal.retry_after_ms >= 50 for refusal in refused)
    late = [outcome for outcome in after if outcome.request.arrival > 25.0]
    assert late
    assert all(outcome.is_good and outcome.ttft_s < 0.3 for outcome in late)


def test_reliability_figure_15_what_expires_in_the_queue_costs_nothing(new_simulation):
    """All at once, before the time of a step is known: everybody is admitted, and most are too late."""
    simulation = new_simulation(replace(PLAIN, policy=Policy.DEADLINE))
    for number in range(400):
        simulation.ask(0.001 * number, 200, 64, within_s=4.0)
    simulation.run()
    good = [outcome for outcome in simulation.outcomes if outcome.is_good]
    expired = [outcome for outcome in simulation.outcomes if outcome.accepted and not outcome.is_good]
    in_queue = [outcome for outcome in expired if outcome.num_tokens == 0 and outcome.num_computed == 0]
    assert len(good) > 60
    assert len(in_queue) > 100
    assert len(expired) - len(in_queue) < 10, "of those that cannot be in time hardly any is begun"


def test_a_lone_request_is_never_refused_for_its_deadline(new_simulation):
    """Whatever went before, and though the machine has become ten times slower: or nothing would ever be learned."""
    simulation = new_simulation()
    arrive(simulation, 100.0, 5.0, within_s=1.0)
    simulation.run()
    alone = simulation.ask(simulation.now + 1.0, 400, 128, within_s=1.0)
    simulation.run()
    assert alone.refused is None


# Predictions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.7, 1.0])
def test_predicted_time_to_first_token(new_simulation, load):
    possible = capacity(new_simulation, PLAIN)
    simulation = new_simulation()
    arrive(simulation, 2 * possible, 1.0)
    simulation.run()
    outcomes = arrive(simulation, load * possible, 20.0)
    simulation.run()
    errors = predictions(outcomes)
    assert len(errors) == len(outcomes)
    assert median(errors) <= 0.25


def test_predictions_on_a_machine_that_is_busy_with_other_things_too(new_simulation):
    simulation = new_simulation(noise=0.4)
    arrive(simulation, 15.0, 20.0)
    simulation.run()
    assert median(predictions(simulation.outcomes)) <= 0.4


# Tenants --------------------------------------------------------------------------------------------------------------


def p99(values):
    return sorted(values)[int(0.99 * len(values))]


def test_reliability_figure_16_a_tenant_at_50_times_its_share(new_simulation):
    """Both may have six live requests: another's p99 time to first token stays within 1.5x of alone."""
    config = replace(PLAIN, policy=Policy.FAIR, default_tenant=TenantLimits(max_live_requests=6))
    times = {}
    for name in ("alone", "beside"):
        simulation = new_simulation(config)
        if name == "beside":
            arrive(simulation, 50 * 6.0, 13.0, seed=4, tenant="loud")
            simulation.run(2.0)
        quiet = arrive(simulation, 6.0, 10.0, seed=3, tenant="quiet")
        simulation.run()
        assert all(outcome.is_good or outcome.refused.kind is RefusalKind.TENANT_BUSY for outcome in quiet)
        assert sum(outcome.is_good for outcome in quiet) > 50
        times[name] = p99([outcome.ttft_s for outcome in quiet if outcome.is_good])
    assert times["beside"] <= 1.5 * times["alone"]


def test_served_tokens_follow_the_weights(new_simulation):
    tenants = {"one": TenantLimits(weight=1.0), "three": TenantLimits(weight=3.0)}
    simulation = new_simulation(replace(PLAIN, policy=Policy.FAIR, tenants=tenants))
    for tenant in tenants:
        arrive(simulation, 80.0, 20.0, seed=tenant, tenant=tenant)
    simulation.run(20.0)
    served = {
        tenant: sum(outcome.num_computed for outcome in simulation.outcomes if outcome.request.tenant == tenant)
        for tenant in tenants
    }
    assert served["three"] / served["one"] == pytest.approx(3.0, rel=0.15)


# Changes under load ---------------------------------------------------------------------------------------------------


def test_what_is_changed_live_under_load_loses_no_request(new_simulation):
    """Each policy and each limit, back and forth, every half second."""
    simulation = new_simulation()
    outcomes = [
        outcome for number in range(3) for outcome in arrive(simulation, 8.0, 20.0, seed=number, tenant=str(number))
    ]
    changes: list[dict[str, Any]] = [
        *({"policy": policy} for policy in Policy),
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 64},
        {"target_itl_s": 0.01},
        {"max_queued_requests": 2000, "max_queued_tokens": 1_000_000},
        {"default_tenant": TenantLimits(weight=2.0), "tenants": {"1": TenantLimits(weight=9.0)}},
        {"explain_requests": 1},
    ]
    for number in range(40):
        config = replace(PLAIN, **changes[number % len(changes)])
        simulation.at(0.5 * number, lambda config=config: simulation.scheduler.reconfigure(config))
    simulation.run()
    assert all(outcome.is_good and outcome.num_tokens == outcome.request.max_tokens for outcome in outcomes)
    assert not simulation.scheduler.requests
