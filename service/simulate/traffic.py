"""Sends a load to simulated replicas as ``penstock bench`` sends it to a service, and records each request."""

from collections.abc import Callable, Iterator, Sequence

from penstock.clients.bench.target import NOT_SENT, OK, Record, context
from penstock.clients.bench.workload import BenchRequest, ClosedLoop, Workload
from penstock.scheduler.request import (
    EngineFinishReason,
    Event,
    Refused,
    RequestAccepted,
    RequestFinished,
    SequenceDelta,
)
from penstock.scheduler.simulation.replica import SimulatedReplica
from penstock.scheduler.simulation.simulation import Simulation
from penstock.service.errors import Reason, from_refusal

_PAUSE_AFTER_FAILURE_S = 0.1


class Traffic:
    """The clients of a simulation."""

    def __init__(
        self,
        simulation: Simulation,
        load: Workload,
        *,
        timeout_s: float | None = None,
        max_drafts: int = 0,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """``timeout_s`` is the deadline of each request, and ``on_end`` is called when one has ended."""
        self.simulation = simulation
        self.records: list[Record] = []
        self.timeout_s = timeout_s
        self.max_drafts = max_drafts
        self.on_end = on_end
        self._load = load
        self._conversations: Iterator[Sequence[BenchRequest]] = iter(())

    def start(self) -> None:
        """Starts the first conversations, which start the others when their turn comes."""
        self._conversations = iter(self._load.conversations())
        if isinstance(self._load.arrivals, ClosedLoop):
            for _ in range(self._load.arrivals.concurrency):
                self._fill_slot()
        else:
            self._start_at_its_time()

    def _fill_slot(self) -> None:
        turns = next(self._conversations, None)
        if turns is not None:
            _SimulatedConversation(self, turns, self._on_slot_free).send_next()

    def _on_slot_free(self, last: Record) -> None:
        pause_s = 0.0 if last.is_ok else max(_PAUSE_AFTER_FAILURE_S, last.retry_after_s or 0.0)
        self.simulation.at(last.ended_s + pause_s, self._fill_slot)

    def _start_at_its_time(self) -> None:
        turns = next(self._conversations, None)
        if turns is not None:
            conversation = _SimulatedConversation(self, turns, lambda last: None)

            def start() -> None:
                conversation.send_next()
                self._start_at_its_time()

            self.simulation.at(turns[0].arrival_s or 0.0, start)


class _SimulatedConversation:
    """A conversation, whose turns all go to the same replica."""

    def __init__(self, traffic: Traffic, turns: Sequence[BenchRequest], on_end: Callable[[Record], object]) -> None:
        self._traffic = traffic
        self._simulation = traffic.simulation
        self._turns = turns
        self._past: list[Record] = []
        self._replica: SimulatedReplica | None = None
        self._on_end = on_end

    def send_next(self) -> None:
        """Sends the next turn at its time."""
        simulation = self._simulation
        due = self._turns[len(self._past)].arrival_s
        if due is None or due <= simulation.now:
            self._send()
        else:
            simulation.at(due, self._send)

    def _send(self) -> None:
        simulation = self._simulation
        record = Record(self._turns[len(self._past)], simulation.now)
        self._traffic.records.append(record)
        simulation.at(simulation.now + simulation.service.request_s, lambda: self._arrive(record))

    def _arrive(self, record: Record) -> None:
        traffic, simulation = self._traffic, self._simulation
        if self._replica is None:
            self._replica = simulation.route()
        prompt = context(record.request, self._past)
        record.prompt_tokens = len(prompt)
        request = simulation.new_request(
            str(record.request.number),
            prompt,
            record.request.max_tokens,
            lambda event: self._take(record, event),
            arrival=simulation.now,
            deadline=None if traffic.timeout_s is None else record.sent_s + traffic.timeout_s,
            max_drafts=traffic.max_drafts,
        )
        try:
            self._replica.add_request(request)
        except Refused as refused:
            error = from_refusal(refused)
            if error.retry_after_ms is not None and error.retry_after_ms > 0:
                record.retry_after_s = error.retry_after_ms / 1000
            ended = simulation.now + simulation.service.message_s
            record.fail(ended, error.code.name, error.message, error.reason.name)
            self._end(record)

    def _take(self, record: Record, event: Event) -> None:
        assert self._replica is not None
        if isinstance(event, SequenceDelta):
            # Only a later turn needs the ids.
            token_ids = event.token_ids if len(self._turns) > 1 else ()
            record.tokens(self._replica.delivered_at, token_ids, len(event.token_ids))
        elif isinstance(event, RequestAccepted):
            record.predicted_ttft_s = event.predicted_ttft_s
        elif isinstance(event, RequestFinished):
            self._finish(record, event, self._replica.delivered_at)

    def _finish(self, record: Record, finished: RequestFinished, when: float) -> None:
        record.cached_tokens = finished.usage.cached_tokens
        record.finish_reason = finished.reason.name
        if (counts := finished.speculation) is not None:
            record.drafts, record.drafted_tokens, record.accepted_tokens = counts.steps, counts.drafted, counts.accepted
        if finished.reason in (EngineFinishReason.STOP, EngineFinishReason.LENGTH):
            record.ended_s, record.status = when, OK
        else:
            reason = Reason[finished.reason.name]
            record.fail(when, reason.code.name, finished.message or reason.message, reason.name)
        self._end(record)

    def _end(self, record: Record) -> None:
        """Sends the next turn, or ends the conversation if this was the last one, or failed."""
        self._traffic.on_end()
        self._past.append(record)
        rest = self._turns[len(self._past) :]
        if rest and record.is_ok:
            self._simulation.at(record.ended_s, self.send_next)
            return
        for request in rest:
            unsent = Record(request, record.ended_s)
            unsent.fail(record.ended_s, NOT_SENT, "the previous turn failed")
            self._traffic.records.append(unsent)
            self._traffic.on_end()
        self._on_end(record)
