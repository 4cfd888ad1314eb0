"""One simulated run, and its figures."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.clients.bench.report import ClientLoad, Report, Slo
from penstock.clients.bench.trace import Trace
from penstock.scheduler.simulation.simulation import Simulation
from penstock.scheduler.simulation.worker import SimulatedWorker
from penstock.service.simulate.settings import SimulatedService
from penstock.service.simulate.traffic import Traffic


@dataclass(frozen=True)
class SimulatedRun:
    """The results of a run."""

    service: SimulatedService
    report: Report
    preemptions: int
    mean_kv: float
    """The mean share of the KV cache that rows held, over time and replicas."""
    most_kv: float
    """The maximum share of a replica's KV cache that rows held."""
    busy_share: float
    """The share of the time in which the workers computed."""
    steps: int
    most_tokens: int
    """Tokens of the step that had the most."""
    most_rows: int
    """Decoding rows of the step that had the most."""
    wall_s: float
    """The real time that the simulation took."""

    def summary(self, slo: Slo | None) -> dict[str, Any]:
        """Returns all figures by name; times are in seconds. docs/simulate.md describes them."""
        summary = self.report.summary(slo)
        prompt_tokens = summary["prompt_tokens"]
        return {
            **summary,
            "client": None,
            "cached_share": summary["cached_tokens"] / prompt_tokens if prompt_tokens else 0.0,
            "preemptions": self.preemptions,
            "kv_usage": {"mean": self.mean_kv, "max": self.most_kv},
            "busy_share": self.busy_share,
            "steps": self.steps,
            "wall_s": self.wall_s,
        }


def simulate(
    service: SimulatedService,
    trace: Trace,
    *,
    timeout_s: float | None = None,
    seed: int | str = 0,
    on_end: Callable[[], object] = lambda: None,
) -> SimulatedRun:
    """Runs a load to its end. ``timeout_s`` is the deadline of each request, and ``on_end`` is called when one has
    ended. The same arguments give the same results."""
    costs = service.costs
    numbers = iter(range(service.replicas))
    workers: list[SimulatedWorker] = []

    def new_worker() -> SimulatedWorker:
        workers.append(SimulatedWorker(costs, f"{seed}/{next(numbers)}"))
        return workers[-1]

    began = time.perf_counter()
    with _calm_collector():
        simulation = Simulation(
            service.facts,
            service.limits,
            new_worker,
            costs.service,
            num_replicas=service.replicas,
            routing=service.routing,
            hop_s=service.hop_s,
        )
        traffic = Traffic(
            simulation, service.loaded(trace), timeout_s=timeout_s, max_drafts=costs.drafts.most, on_end=on_end
        )
        traffic.start()
        simulation.run()
    ended_s = max((record.ended_s for record in traffic.records), default=0.0)
    replicas = simulation.replicas
    counters = [replica.scheduler.counters for replica in replicas]
    return SimulatedRun(
        service,
        Report(traffic.records, 0.0, ended_s, ClientLoad(0.0, 0.0, 0.0)),
        preemptions=sum(each.preemptions for each in counters),
        mean_kv=sum(replica.mean_kv for replica in replicas) / len(replicas),
        most_kv=max(replica.most_kv for replica in replicas),
        busy_share=sum(replica.stages.busy_s for replica in replicas) / max(1e-9, ended_s * service.workers),
        steps=sum(each.steps for each in counters),
        most_tokens=max(worker.most_tokens for worker in workers),
        most_rows=max(worker.most_rows for worker in workers),
        wall_s=time.perf_counter() - began,
    )


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Makes Python's cycle collector run rarely: it would scan all requests again and again."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
