"""Replicas in virtual time: what steps, stages and the service itself cost, and where requests go."""

import random

import pytest
from msgspec.structs import replace
from simulations.step_logs import COSTS, FACTS, LIMITS

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Chunk, Decode, RowResult, StepPlan, StepResult
from penstock.scheduler.request import EngineFinishReason, RefusalKind
from penstock.scheduler.simulation.clock import VirtualClock
from penstock.scheduler.simulation.costs import (
    DraftRates,
    MeasuredFactor,
    ServiceCosts,
    SimulatedCosts,
    StepCosts,
    StepNoise,
)
from penstock.scheduler.simulation.simulation import Routing, Simulation
from penstock.scheduler.simulation.stages import StageTimes
from penstock.scheduler.simulation.worker import SimulatedWorker
from penstock.scheduler.testing.simulation import checked_simulation, cpu_step_s

STEP_S, TOKEN_S, ROW_S = 0.02, 1e-4, 1e-3
SIMPLE = SimulatedCosts(StepCosts(constant=STEP_S, prefill_tokens=TOKEN_S, decodes=ROW_S))


def new_simulation(costs=SIMPLE, facts=FACTS, limits=LIMITS, **settings):
    return Simulation(facts, limits, lambda: SimulatedWorker(costs), costs.service, **settings)


def arrive(simulation, number, rate=20.0, seed=0, **fields):
    rng, when = random.Random(seed), 0.0
    for _ in range(number):
        when += rng.expovariate(rate)
        simulation.ask(when, rng.randint(20, 400), rng.randint(1, 60), **fields)


def factors(*values):
    """One each second."""
    return [MeasuredFactor(float(number), value) for number, value in enumerate(values)]


def plan(step, chunks=(), decodes=()):
    return StepPlan(step, [], [], [], [Chunk(row, 0, 4) for row in chunks], [Decode(row, 1) for row in decodes])


def result(step, rows, seconds):
    return StepResult(step, [RowResult(row, 0, 4, [1]) for row in rows], [], 0, round(seconds * 1e6))


def test_actions_run_in_the_order_of_their_times_and_never_in_the_past():
    clock, seen = VirtualClock(), []

    def first():
        seen.append(("first", clock.now))
        clock.at(0.0, lambda: seen.append(("late", clock.now)))

    clock.at(2.0, lambda: seen.append(("second", clock.now)))
    clock.at(1.0, first)
    clock.at(9.0, lambda: seen.append(("never", clock.now)))
    clock.run(3.0)
    assert seen == [("first", 1.0), ("late", 1.0), ("second", 2.0)]
    assert clock.now == 3.0


def test_a_request_takes_what_its_steps_cost():
    simulation = new_simulation()
    outcome = simulation.ask(1.0, 100, 4)
    simulation.run()
    first = 1.0 + STEP_S + 100 * TOKEN_S
    assert outcome.first_token_at == pytest.approx(first)
    assert outcome.ended_at == pytest.approx(first + 3 * (STEP_S + ROW_S))
    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.LENGTH


def test_what_the_service_costs_is_added():
    service = ServiceCosts(submit_s=0.001, answer_s=0.002, handle_s=0.004, handle_row_s=0.001, message_s=0.01)
    simulation = new_simulation(SimulatedCosts(SIMPLE.step, service=service))
    outcome = simulation.ask(1.0, 100, 1)
    simulation.run()
    assert outcome.ended_at == pytest.approx(1.0 + 0.001 + STEP_S + 100 * TOKEN_S + 0.002)
    assert simulation.replicas[0].delivered_at == pytest.approx(outcome.ended_at + 0.004 + 0.001 + 0.01)


def test_a_service_that_is_slower_than_its_worker_limits_the_throughput():
    def seconds(handle_s):
        simulation = new_simulation(SimulatedCosts(SIMPLE.step, service=ServiceCosts(handle_s=handle_s)))
        outcome = simulation.ask(0.0, 16, 101)
        simulation.run()
        return outcome.ended_at - outcome.first_token_at

    assert seconds(0.0) == pytest.approx(seconds(0.015)) == pytest.approx(100 * (STEP_S + ROW_S))
    assert seconds(0.05) == pytest.approx(100 * 0.05, rel=0.02)


def test_the_light_worker_does_what_the_one_that_checks_everything_does():
    limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=96)
    facts = replace(FACTS, num_blocks=120, max_num_batched_tokens=96, max_num_seqs=16, vocab_size=1 << 30)
    light = new_simulation(SimulatedCosts(COSTS), facts, limits, delays_plans=False)
    checked = checked_simulation(facts, limits, cpu_step_s)
    for simulation in (light, checked):
        arrive(simulation, 150, rate=40.0)
        arrive(simulation, 30, rate=8.0, seed=1, history=[7] * 100)
        arrive(simulation, 30, rate=8.0, seed=2, within_s=1.0, n=2)
        simulation.run()
    assert checked.scheduler.counters.preemptions > 0
    assert checked.scheduler.counters.cached_tokens > 0
    assert light.scheduler.counters == checked.scheduler.counters
    for one, other in zip(light.outcomes, checked.outcomes, strict=True):
        assert (one.num_tokens, one.ended_at) == (other.num_tokens, pytest.approx(other.ended_at, abs=1e-4))


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    noisy = SimulatedCosts(SIMPLE.step, StepNoise(factors(0.8, 1.0, 1.3), factors(0.9, 1.2)))

    def ends(seed):
        simulation = Simulation(FACTS, LIMITS, lambda: SimulatedWorker(noisy, seed))
        arrive(simulation, 50)
        simulation.run()
        return [outcome.ended_at for outcome in simulation.outcomes]

    assert ends(1) == ends(1) != ends(2)


def test_noise_is_replayed_by_time():
    noise = StepNoise(factors(0.5, 1.0, 2.0), [MeasuredFactor(0.0, 3.0), MeasuredFactor(4.0, 5.0)])
    assert [noise.factor(when, False) for when in (0.5, 1.5, 2.5, 4.5, 5.5)] == [1.0, 2.0, 1.0, 1.0, 2.0]
    assert [noise.factor(when, True) for when in (0.5, 3.9, 4.5)] == [5.0, 5.0, 5.0]
    assert (noise.seconds(False), noise.seconds(True)) == (2.0, 4.0)
    assert StepNoise().factor(7.0, True) == 1.0


def test_requests_go_to_the_replica_with_the_fewest_or_to_each_in_turn():
    def served(routing):
        simulation = new_simulation(num_replicas=3, routing=routing)
        simulation.ask(0.0, 16, 200)
        for number in range(4):  # one at a time
            simulation.ask(1.0 + 1.2 * number, 16, 2)
        simulation.run()
        return [replica.scheduler.counters.prefill_tokens // 16 for replica in simulation.replicas]

    assert served(Routing.LEAST_REQUESTS) == [2, 3, 0]  # the last comes when the long one is done
    assert served(Routing.ROUND_ROBIN) == [2, 2, 1]


def test_two_replicas_do_twice_as_much():
    def seconds(num_replicas):
        simulation = new_simulation(num_replicas=num_replicas, limits=SchedulerConfig(max_num_seqs=4))
        for _ in range(64):
            simulation.ask(0.0, 16, 32)
        simulation.run()
        assert all(outcome.is_good for outcome in simulation.outcomes)
        return simulation.now

    assert seconds(2) == pytest.approx(seconds(1) / 2, rel=0.02)


def test_two_stages_overlap_where_rows_are_many_and_a_single_row_gains_nothing():
    def seconds(num_stages, num_rows, hop_s=0.0):
        facts = replace(FACTS, stage_layers=(1,) * num_stages if num_stages > 1 else ())
        simulation = new_simulation(SimulatedCosts(StepCosts(constant=STEP_S)), facts, hop_s=hop_s)
        for _ in range(num_rows):
            simulation.ask(0.0, 4, 100)
        simulation.run()
        assert all(outcome.is_good for outcome in simulation.outcomes)
        return simulation.now

    # Each of two groups of rows is in every second step, which takes half as long.
    assert seconds(2, 16) == pytest.approx(seconds(1, 16), rel=0.1)
    assert seconds(2, 1) == pytest.approx(seconds(1, 1), rel=0.02)
    assert seconds(2, 1, hop_s=0.01) == pytest.approx(100 * (STEP_S + 2 * 0.01), rel=0.02)


def test_stages_gain_where_rows_cost_more_than_steps():
    def seconds(num_stages):
        facts = replace(FACTS, stage_layers=(1,) * num_stages if num_stages > 1 else ())
        simulation = new_simulation(SimulatedCosts(StepCosts(decodes=ROW_S, prefill_tokens=TOKEN_S)), facts)
        for _ in range(32):
            simulation.ask(0.0, 4, 100)
        simulation.run()
        return simulation.now

    assert seconds(2) < 0.6 * seconds(1)


def test_when_stages_compute():
    """The drawing of the class: every stage takes 2 s of 6."""
    stages = StageTimes(3)
    assert stages.run(plan(0, chunks=[1]), first := result(0, [1], 6.0), 1.0) == pytest.approx(7.0)
    assert stages.run(plan(1, chunks=[2]), second := result(1, [2], 6.0), 1.0) == pytest.approx(9.0)
    # Row 1 has its token at 7, so the third step waits for it.
    assert stages.run(plan(2, decodes=[1]), third := result(2, [1], 6.0), 1.0) == pytest.approx(13.0)
    assert [each.computed_us for each in (first, second, third)] == [6_000_000, 2_000_000, 4_000_000]
    assert stages.busy_s == pytest.approx(18.0)


def test_hops_lie_between_stages_and_on_the_way_back():
    assert StageTimes(3, 0.5).run(plan(0, chunks=[1]), result(0, [1], 6.0), 0.0) == pytest.approx(7.5)
    assert StageTimes(1, 0.5).run(plan(0, chunks=[1]), result(0, [1], 6.0), 0.0) == pytest.approx(6.0)


def test_kv_is_counted_and_too_little_of_it_preempts_or_refuses():
    simulation = new_simulation(facts=replace(FACTS, num_blocks=20))
    for _ in range(8):
        simulation.ask(0.0, 32, 100)
    large = simulation.ask(0.1, 300, 100)
    simulation.run()
    (replica,) = simulation.replicas
    assert large.refused is not None
    assert large.refused.kind is RefusalKind.TOO_LARGE
    assert replica.scheduler.counters.preemptions > 0
    assert 0.5 < replica.mean_kv < replica.most_kv <= 1.0
    assert all(outcome.is_good for outcome in simulation.outcomes[:-1])


def test_a_deadline_ends_a_request():
    simulation = new_simulation()
    outcome = simulation.ask(0.0, 16, 100, within_s=0.5)
    simulation.run()
    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.DEADLINE
    assert outcome.ended_at == pytest.approx(0.5)
    assert 0 < outcome.num_tokens < 100


def test_accepted_drafts_save_steps():
    def steps(rates):
        simulation = new_simulation(SimulatedCosts(SIMPLE.step, drafts=rates))
        simulation.ask(0.0, 16, 200, max_drafts=rates.most)
        simulation.run()
        assert simulation.outcomes[0].num_tokens == 200
        return simulation.scheduler.counters.steps

    assert steps(DraftRates()) >= 200
    assert steps(DraftRates(per_row=2.0, accepted=1.0, most=4)) == pytest.approx(200 / 3, abs=5)
    assert 67 < steps(DraftRates(per_row=2.0, accepted=0.5, most=4)) < 150
