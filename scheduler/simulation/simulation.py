"""Simulates replicas under load in virtual time: minutes in seconds, deterministically.

Only the clock and the workers are simulated; a step takes the time that its worker reports. It needs no event loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.kv.block_hash import hash_blocks
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import (
    EngineFinishReason,
    Event,
    Refused,
    Request,
    RequestAccepted,
    RequestFinished,
    SequenceDelta,
    TextDelta,
)
from penstock.scheduler.simulation.clock import VirtualClock
from penstock.scheduler.simulation.costs import NO_SERVICE_COSTS, ServiceCosts
from penstock.scheduler.simulation.replica import SimulatedReplica
from penstock.scheduler.simulation.worker import TimedWorker
from penstock.scheduler.worker_config import WorkerFacts


class Routing(Enum):
    """How a request finds its replica."""

    LEAST_REQUESTS = "least-requests"
    """The replica with the fewest unfinished requests; among equals, the first."""
    ROUND_ROBIN = "round-robin"
    """One replica after another."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are virtual seconds."""

    request: Request
    refused: Refused | None = None
    accepted: RequestAccepted | None = None
    first_token_at: float | None = None
    finished: RequestFinished | None = None
    ended_at: float | None = None
    num_tokens: int = 0
    num_computed: int = 0
    """Positions that the worker computed for it, if the worker counts them."""

    @property
    def is_good(self) -> bool:
        """Whether it ended normally, and in time if it had a deadline."""
        if self.finished is None or self.finished.reason not in (EngineFinishReason.STOP, EngineFinishReason.LENGTH):
            return False
        assert self.ended_at is not None
        return self.request.deadline is None or self.ended_at <= self.request.deadline

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.request.arrival


class Simulation:
    """Replicas of a service on one virtual clock, whose time passes only in ``run``."""

    def __init__(
        self,
        facts: WorkerFacts,
        config: SchedulerConfig,
        new_worker: Callable[[], TimedWorker],
        service: ServiceCosts = NO_SERVICE_COSTS,
        *,
        num_replicas: int = 1,
        routing: Routing = Routing.LEAST_REQUESTS,
        hop_s: float = 0.0,
        delays_plans: bool = True,
    ) -> None:
        """``new_worker`` is called for each replica. The other parameters are those of ``SimulatedReplica``."""
        self.clock = VirtualClock()
        self.service = service
        self.outcomes: list[Outcome] = []
        """The requests in the order of the calls of ``ask``."""
        self.workers = [new_worker() for _ in range(num_replicas)]
        self.replicas = [
            SimulatedReplica(self.clock, facts, config, worker, service, hop_s=hop_s, delays_plans=delays_plans)
            for worker in self.workers
        ]
        self._block_size = facts.block_size
        self._caches_prefixes = config.enable_prefix_caching
        self._routing = routing
        self._num_routed = 0

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self.clock.now

    @property
    def scheduler(self) -> Scheduler:
        """The first replica's scheduler."""
        return self.replicas[0].scheduler

    def at(self, when: float, action: Callable[[], object]) -> None:
        self.clock.at(when, action)

    def run(self, until: float = float("inf")) -> None:
        """Runs until the given time, or until no events are left."""
        self.clock.run(until)

    def route(self) -> SimulatedReplica:
        """Returns the replica for the next request."""
        if self._routing is Routing.LEAST_REQUESTS:
            return min(self.replicas, key=lambda replica: replica.num_live)
        self._num_routed += 1
        return self.replicas[(self._num_routed - 1) % len(self.replicas)]

    def new_request(
        self, request_id: str, prompt: list[int], max_tokens: int, sink: Callable[[Event], None], **fields: object
    ) -> Request:
        """Returns a request whose output has exactly ``max_tokens``, unless ``fields`` differ: those of ``Request``."""
        hashes = hash_blocks(prompt, self._block_size, b"") if self._caches_prefixes else []
        given: dict[str, object] = {"make_text": _EndlessText, "sampling": SamplingParams(), **fields}
        return Request(request_id, prompt, hashes, max_tokens=max_tokens, sink=sink, **given)  # type: ignore[arg-type]

    def ask(
        self,
        when: float,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        tenant: str = "default",
        priority: int = 0,
        within_s: float | None = None,
        stops_after: int | None = None,
        max_drafts: int = 0,
        n: int = 1,
        history: Sequence[int] = (),
    ) -> Outcome:
        """Adds a request that arrives at ``when`` and must end within ``within_s`` of that. Its output ends by itself
        after ``stops_after`` tokens.

        Its prompt is ``history``, which other requests may share, followed by ``num_prompt_tokens`` of its own, each of
        which is the number of the request.
        """
        number = len(self.outcomes)
        request = self.new_request(
            str(number),
            [*history, *[number] * num_prompt_tokens],
            max_tokens,
            lambda event: self._note(outcome, event),
            n=n,
            make_text=lambda: _StopAfter(stops_after),
            tenant=tenant,
            priority=priority,
            deadline=None if within_s is None else when + within_s,
            arrival=when,
            max_drafts=max_drafts,
        )
        outcome = Outcome(request)
        self.outcomes.append(outcome)
        self.at(when, lambda: self._arrive(outcome))
        return outcome

    def _arrive(self, outcome: Outcome) -> None:
        try:
            self.route().add_request(outcome.request)
        except Refused as refused:
            outcome.refused, outcome.ended_at = refused, self.now

    def _note(self, outcome: Outcome, event: Event) -> None:
        if isinstance(event, RequestAccepted):
            outcome.accepted = event
        elif isinstance(event, SequenceDelta):
            outcome.num_tokens += len(event.token_ids)
            if outcome.first_token_at is None:
                outcome.first_token_at = self.now
        elif isinstance(event, RequestFinished):
            outcome.finished, outcome.ended_at = event, self.now


_TOKEN, _NO_TOKEN = TextDelta(1, ""), TextDelta(0, "")


class _EndlessText:
    """Releases each token at once, and never ends the output."""

    def feed(self, token_id: int) -> TextDelta:
        return _TOKEN

    def finish(self) -> TextDelta:
        return _NO_TOKEN

    def restart(self) -> None:
        """Does nothing: nothing is injected."""


class _StopAfter(_EndlessText):
    """Ends the output after this many tokens, as a stop string does."""

    def __init__(self, stops_after: int | None) -> None:
        self._left = stops_after

    def feed(self, token_id: int) -> TextDelta:
        if self._left is not None:
            self._left -= 1
        return TextDelta(1, "", stop="" if self._left == 0 else None)
