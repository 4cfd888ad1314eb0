"""Predictions of loads that were not measured, from the log of one that was. What is predicted is simulated too, with
the costs that the log was made with, so that the right figures are known."""

import pytest
from simulations.step_logs import COSTS, FACTS, LIMITS, LoggingWorker, header

from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.trace import Trace
from penstock.clients.bench.workload import OpenLoop, RandomLoad
from penstock.scheduler.simulation.costs import MeasuredFactor, ServiceCosts, SimulatedCosts, StepNoise
from penstock.scheduler.simulation.fit import fit_costs
from penstock.scheduler.simulation.simulation import Simulation
from penstock.scheduler.simulation.step_log import StepLog
from penstock.scheduler.simulation.worker import SimulatedWorker
from penstock.service.simulate.run import simulate
from penstock.service.simulate.settings import SETTINGS, SimulatedService
from penstock.service.simulate.traffic import Traffic

FACTORS = [MeasuredFactor(0.01 * number, factor) for number, factor in enumerate((0.9, 0.95, 1.0, 1.05, 1.3))]
NOISE = StepNoise(FACTORS, FACTORS)
TRUE = SimulatedCosts(COSTS, NOISE, ServiceCosts(5e-4, 5e-4, 1e-4, 0.0, 6e-4, 4e-4))
BOUND = 0.15


def load(rate=12.0, prompt=(50, 500), output=(16, 96), number=80, seed=0):
    drawn = RandomLoad(FACTS.vocab_size, OpenLoop(rate), number, Uniform(*prompt), Uniform(*output), seed=seed)
    return Trace([turn for turns in drawn.conversations() for turn in turns])


@pytest.fixture(scope="module")
def fitted():
    """The costs that were fitted to the log of one load."""
    workers: list[LoggingWorker] = []

    def new_worker():
        workers.append(LoggingWorker(SimulatedWorker(TRUE)))
        return workers[-1]

    simulation = Simulation(FACTS, LIMITS, new_worker, TRUE.service)
    Traffic(simulation, load()).start()
    simulation.run()
    return fit_costs(StepLog(header(), workers[0].steps)).costs


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        (load(rate=24.0, seed=1), {}),
        (load(prompt=(300, 900), rate=8.0, seed=2), {}),
        (load(seed=3), {"max-num-batched-tokens": 64}),
        (load(rate=40.0, seed=4), {"replicas": 3, "max-num-seqs": 8}),
    ],
    ids=["rate", "prompts", "budget", "replicas"],
)
def test_other_loads_are_predicted(fitted, changed, settings):
    def figures(costs):
        service = SimulatedService(FACTS, LIMITS, costs)
        for name, value in settings.items():
            service = SETTINGS[name].apply(service, value)
        summary = simulate(service, changed, seed=str(costs is TRUE)).summary(None)
        return {
            "requests_per_s": summary["requests_per_s"],
            "output_tokens_per_s": summary["output_tokens_per_s"],
            **{name: summary["times_s"][name]["p50"] for name in ("ttft", "itl", "tpot", "e2e")},
        }

    predicted, true = figures(fitted), figures(TRUE)
    assert predicted == pytest.approx(true, rel=BOUND)
    other = figures(SimulatedCosts(COSTS._replace(constant=2 * COSTS.constant), NOISE, TRUE.service))
    assert other != pytest.approx(true, rel=BOUND), "the bound is narrow enough"
