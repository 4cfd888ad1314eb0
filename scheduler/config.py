"""The scheduler's limits: immutable, complete, validated once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.scheduler.executor import MAX_PLANS_IN_FLIGHT
from penstock.scheduler.policy import Policy
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, WorkerFacts

RETRY_AFTER_MS = 1000
"""The time after which a client may retry what the engine refused, if nothing better is known."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_TARGET_ITL_S = 60.0
MIN_REQUEST_RATE, MAX_REQUEST_RATE = 0.001, 1e6
"""Requests per second."""
MAX_TOKEN_BUDGET = 1 << 40
"""Tokens per minute."""


@dataclass(frozen=True)
class TenantLimits:
    """A tenant's weight and caps; None means no cap. Raises ValueError."""

    weight: float = 1.0
    """Its share of the served tokens under ``fair``, relative to other tenants' weights."""
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    """Output tokens of each sequence."""
    max_live_requests: int | None = None
    requests_per_second: float | None = None
    """The average rate, including refused requests. The requests of one second may arrive at once, and at least one."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs, counted as in usage. As many may be used at once as are gained in a minute."""

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight is {self.weight}; it must be {MIN_WEIGHT} to {MAX_WEIGHT:.0f}")
        for name in ("max_prompt_tokens", "max_tokens", "max_live_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        rate, budget = self.requests_per_second, self.tokens_per_minute
        if rate is not None and not MIN_REQUEST_RATE <= rate <= MAX_REQUEST_RATE:
            limits = f"{MIN_REQUEST_RATE} to {MAX_REQUEST_RATE:,.0f}"
            raise ValueError(f"requests_per_second is {rate}; it must be {limits}")
        if budget is not None and not 1 <= budget <= MAX_TOKEN_BUDGET:
            raise ValueError(f"tokens_per_minute is {budget}; it must be 1 to {MAX_TOKEN_BUDGET:,}")


@dataclass(frozen=True)
class SchedulerConfig:
    """The operator's settings. Where the worker's facts allow less, they apply. Raises ValueError.

    A running scheduler can be given another config; only ``enable_prefix_caching``, ``max_plans_in_flight`` and
    ``drafts_on_repetition`` cannot change after the start.
    """

    max_num_seqs: int = 256
    """The maximum number of rows that run at once. A request of n sequences has n rows."""
    max_num_batched_tokens: int = MAX_BATCHED_TOKENS
    """The token budget of a step. At most this many rows run at once, so that each gets a token in every step."""
    max_queued_requests: int = 1024
    """The maximum number of requests that have not begun; one more is refused."""
    max_queued_tokens: int = 4_000_000
    """The maximum number of prompt tokens of requests that have not begun."""
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    max_plans_in_flight: int = MAX_PLANS_IN_FLIGHT
    """The maximum number of plans without a result: 1 or 2, and one more for each stage after the first."""
    target_itl_s: float | None = None
    """The target time between a row's tokens, which limits the chunks of prompts in the same step; None: see
    ``timing/step_time.py``."""
    default_tenant: TenantLimits = TenantLimits()
    """The limits of tenants that ``tenants`` does not contain."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    explain_requests: int = 1000
    """The number of finished requests whose timelines are kept."""
    drafts_on_repetition: bool = False
    """Whether sequences have drafts from their own text only while it repeats itself."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.max_plans_in_flight <= MAX_PLANS_IN_FLIGHT:
            raise ValueError(f"max_plans_in_flight is {self.max_plans_in_flight}; must be 1 to {MAX_PLANS_IN_FLIGHT}")
        if self.explain_requests < 0:
            raise ValueError(f"explain_requests is {self.explain_requests}; it must be at least 0")
        if self.target_itl_s is not None and not 0 < self.target_itl_s <= MAX_TARGET_ITL_S:
            limit = math.floor(MAX_TARGET_ITL_S)
            raise ValueError(f"target_itl_s is {self.target_itl_s}; it must be above 0 and at most {limit}")

    def tenant(self, name: str) -> TenantLimits:
        return self.tenants.get(name, self.default_tenant)

    def check_fits(self, facts: WorkerFacts, running: "SchedulerConfig") -> None:
        """Raises ValueError if this config cannot replace ``running``, with which a worker with these facts runs."""
        for name in ("enable_prefix_caching", "max_plans_in_flight", "drafts_on_repetition"):
            assert getattr(self, name) == getattr(running, name), f"{name} stays as it was at the start"
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value, most = getattr(self, name), getattr(facts, name)
            if value > most and value != getattr(running, name):
                raise ValueError(
                    f"{name} is {value}; the worker was started with {most}, and may not have more: lower it, or "
                    f"start the service again with a larger --{name.replace('_', '-')}"
                )

    def token_budget(self, facts: WorkerFacts) -> int:
        """Returns the maximum number of tokens in a step on this worker."""
        return min(self.max_num_batched_tokens, facts.max_num_batched_tokens)

    def max_rows(self, facts: WorkerFacts) -> int:
        """Returns the maximum number of rows that run at once on this worker: each gets a token in every step."""
        return min(self.max_num_seqs, facts.max_num_seqs, self.token_budget(facts))
