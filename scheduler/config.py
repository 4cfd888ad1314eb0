"""The scheduler's limits: frozen, complete, validated once."""

from dataclasses import dataclass

from penstock.scheduler.executor import MAX_PLANS_IN_FLIGHT
from penstock.scheduler.plan import WorkerFacts
from penstock.scheduler.policy import Policy


@dataclass(frozen=True)
class SchedulerConfig:
    """What the operator chooses. Where the worker's facts allow less, that holds. Raises ValueError."""

    max_num_seqs: int = 256
    """Rows that run at once; a request of n choices has n rows."""
    max_num_batched_tokens: int = 2048
    """The token budget of a step. Rows that run at once are never more than this, so that each gets a token a step."""
    max_queued_requests: int = 1024
    """Requests that have not begun; one more is refused."""
    max_queued_tokens: int = 4_000_000
    """Prompt tokens of the requests that have not begun."""
    policy: Policy = Policy.FCFS
    enable_prefix_caching: bool = True
    max_plans_in_flight: int = MAX_PLANS_IN_FLIGHT
    """Plans that the worker has not answered: 1 or 2."""
    max_decode_tokens: int = 1
    """Tokens that a row may gain in a step; more than one needs a worker that drafts."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queued_requests",
            "max_queued_tokens",
            "max_decode_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.max_plans_in_flight <= MAX_PLANS_IN_FLIGHT:
            raise ValueError(f"max_plans_in_flight is {self.max_plans_in_flight}; must be 1 to {MAX_PLANS_IN_FLIGHT}")
        if self.max_decode_tokens > self.max_num_batched_tokens:
            raise ValueError("max_decode_tokens is above max_num_batched_tokens; a step could not hold one row")

    def token_budget(self, facts: WorkerFacts) -> int:
        """Tokens in a step at most, on this worker."""
        return min(self.max_num_batched_tokens, facts.max_num_batched_tokens)

    def max_rows(self, facts: WorkerFacts) -> int:
        """Rows that run at once at most, on this worker: each gets its tokens in every step."""
        return min(self.max_num_seqs, facts.max_num_seqs, self.token_budget(facts) // self.max_decode_tokens)
