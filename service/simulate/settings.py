"""What is simulated: replicas of a service, with settings that the command line and a sweep can change."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.clients.bench.trace import Trace
from penstock.clients.bench.workload import OpenLoop
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.simulation.costs import SimulatedCosts
from penstock.scheduler.simulation.simulation import Routing
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.config.flags import ConfigError

RATE, REPLICAS, STAGES, KV_TOKENS = "rate", "replicas", "pipeline-parallel-size", "kv-cache-tokens"
MAX_REPLICAS, MAX_STAGES = 256, 64
MAX_KV_TOKENS = 1 << 40


@dataclass(frozen=True)
class SimulatedService:
    """Replicas that are all alike."""

    facts: WorkerFacts
    """The worker, or all stages together."""
    limits: SchedulerConfig
    costs: SimulatedCosts
    replicas: int = 1
    routing: Routing = Routing.LEAST_REQUESTS
    hop_s: float = 0.0
    """The time from one stage to the next."""
    rate: float = 1.0
    """The factor by which requests arrive faster than in the load."""
    swept: Mapping[str, object] = field(default_factory=dict)
    """The settings that a sweep has changed."""

    @property
    def stages(self) -> int:
        return self.facts.pipeline_parallel_size

    @property
    def workers(self) -> int:
        """The price of a configuration: the number of worker processes."""
        return self.replicas * self.stages

    def __str__(self) -> str:
        stages = "" if self.stages == 1 else f" in {self.stages} stages"
        replicas = f"{self.replicas} replica{'' if self.replicas == 1 else 's'}{stages}"
        rows, tokens = self.limits.max_rows(self.facts), self.limits.token_budget(self.facts)
        kv = f"a KV cache of {self.facts.num_kv_tokens:,} tokens"
        faster = "" if self.rate == 1 else f", {self.rate:g} times the rate"
        steps = f"steps of at most {rows:,} sequences and {tokens:,} tokens"
        return f"{replicas}, {steps}, {kv}, {self.limits.policy.value}{faster}"

    def loaded(self, trace: Trace) -> Trace:
        """Returns the load at this service's rate."""
        if self.rate == 1:
            return trace
        if isinstance(trace.arrivals, OpenLoop):
            return replace(trace, arrivals=replace(trace.arrivals, rate=trace.arrivals.rate * self.rate))
        requests = [
            request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s / self.rate)
            for request in trace.requests
        ]
        return replace(trace, requests=requests)


@dataclass(frozen=True)
class Setting:
    """A setting: the meaning of its text, and how it changes a service."""

    parse: Callable[[str], Any]
    """Raises ValueError."""
    apply: Callable[[SimulatedService, Any], SimulatedService]


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers in these bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"must be {low:,} to {high:,}; it is {text}")
        return int(text)

    return parse


def number(low: float, high: float, *, is_open: bool = False) -> Callable[[str], float]:
    """Returns a parser of numbers in these bounds. ``is_open``: ``low`` itself is too small."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (is_open and value == low):
            bounds = f"above {low:g} and at most {high:g}" if is_open else f"{low:g} to {high:g}"
            raise ValueError(f"must be {bounds}; it is {text}")
        return value

    return parse


def _policy(text: str) -> Policy:
    try:
        return Policy(text)
    except ValueError:
        raise ValueError(f"must be {', '.join(policy.value for policy in Policy)}; it is {text}") from None


def _with_facts(service: SimulatedService, **facts: Any) -> SimulatedService:
    return replace(service, facts=msgspec.structs.replace(service.facts, **facts))


def _with_limits(service: SimulatedService, **limits: Any) -> SimulatedService:
    return replace(service, limits=replace(service.limits, **limits))


def _limited(name: str) -> Callable[[SimulatedService, Any], SimulatedService]:
    """Returns a function that sets a limit of both the worker and the scheduler."""
    return lambda service, value: _with_limits(_with_facts(service, **{name: value}), **{name: value})


SETTINGS: Mapping[str, Setting] = {
    RATE: Setting(number(0, 1e6, is_open=True), lambda service, value: replace(service, rate=value)),
    REPLICAS: Setting(whole_number(1, MAX_REPLICAS), lambda service, value: replace(service, replicas=value)),
    STAGES: Setting(
        whole_number(1, MAX_STAGES),
        lambda service, value: _with_facts(service, stage_layers=(1,) * value if value > 1 else ()),
    ),
    "max-num-seqs": Setting(whole_number(1, 4096), _limited("max_num_seqs")),
    "max-num-batched-tokens": Setting(whole_number(1, 1 << 20), _limited("max_num_batched_tokens")),
    KV_TOKENS: Setting(
        whole_number(1, MAX_KV_TOKENS),
        lambda service, value: _with_facts(
            service, num_blocks=max(1, value // service.facts.block_size) * service.facts.groups.num_groups
        ),
    ),
    "scheduling-policy": Setting(_policy, lambda service, value: _with_limits(service, policy=value)),
    "target-itl": Setting(
        number(0, 60_000), lambda service, value: _with_limits(service, target_itl_s=value / 1000 or None)
    ),
    "max-queued-requests": Setting(
        whole_number(1, 1 << 20), lambda service, value: _with_limits(service, max_queued_requests=value)
    ),
    "max-queued-tokens": Setting(
        whole_number(1, 1 << 32), lambda service, value: _with_limits(service, max_queued_tokens=value)
    ),
}
"""The settings that a sweep can change, by name. All but the rate are flags too, most of them flags of ``penstock
serve``."""


def parse_setting(name: str, text: str) -> Any:
    """Returns the value of a setting. Raises ConfigError, without the setting's name."""
    try:
        return SETTINGS[name].parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
