"""A request on a stream, which continues on another stream when its replica dies: token for token, with a pause."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import grpc

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.events import Accepted, Delta, Event, Finished, FinishReason, Injected, Timings, Usage
from penstock.clients.stream import GenerateStream, Receiver

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
"""The maximum number of moves without new output between them."""
MAX_MOVES = 64
"""The maximum number of moves of one request."""
_DELAYS_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""The pause before each of these attempts."""
MAX_TOKENS = 1 << 17
"""The contract's limit on the tokens that are received before a move."""
_TEXT_ONLY = (pb.OUTPUT_FORMAT_UNSPECIFIED, pb.OUTPUT_FORMAT_TEXT)


class OpenStream(Protocol):
    """Returns a stream for a request."""

    def __call__(self, avoid: GenerateStream | None = None) -> GenerateStream:
        """``avoid`` is a stream whose replica is gone or does not want the request: not that one, if there is another
        target."""


class Progress:
    """What has arrived of a request, as another replica needs it."""

    def __init__(self, start: pb.GenerationStart) -> None:
        """``start`` may itself continue a request: what was received of that one counts."""
        self.ticket = start.resume_from.ticket
        self.choices = [pb.ReceivedOutput() for _ in range(max(1, start.sampling.n))]
        for choice, received in zip(self.choices, start.resume_from.choices, strict=False):
            choice.CopyFrom(received)
        self.num_tokens = sum(len(choice.token_ids) for choice in self.choices)

    def add_delta(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        self.num_tokens += len(delta.token_ids)
        choice.text_chars += len(delta.text)
        choice.reasoning_chars += len(delta.reasoning)
        for call in delta.tool_calls:
            if call.index >= choice.tool_calls:
                choice.tool_calls, choice.argument_chars = call.index + 1, 0
            choice.argument_chars += len(call.arguments)
        choice.has_ended = choice.has_ended or delta.end is not None


class CarriedRequest:
    """Carries one request from its start to its end. With ``num_targets`` above 1, it keeps the start, receives token
    ids in any case, and moves when its replica dies; its receiver sees one stream of events.

    A request cannot move once tokens were injected into its output, while its prompt is open, or if it has
    log-probabilities of its prompt.
    """

    def __init__(
        self,
        start: pb.GenerationStart,
        receiver: Receiver,
        open_stream: OpenStream,
        *,
        num_targets: int = 1,
        on_move: Callable[[], None] = lambda: None,
        older: "CarriedRequest | None" = None,
    ) -> None:
        """``start`` is used only here. ``on_move`` is called with each move. ``older`` is the request
        that this one replaces; it ends when this one is accepted."""
        self._receiver = receiver
        self._open_stream = open_stream
        self._num_targets = num_targets
        self._on_move = on_move
        self._may_move = num_targets > 1 and not start.open and not start.output.HasField("prompt_logprobs")
        self._start = pb.GenerationStart()
        self._hides_ids = False
        self._num_attempts = self._num_moves = self._num_refusals = 0
        self._progress = Progress(start)
        self._accepted: Accepted | None = None
        """The first acceptance by a replica."""
        self._is_accepted = False
        """Whether the current replica has accepted it."""
        self._cut: list[Delta] = []
        """The last deltas of a replica that failed, which no other replica would have sent."""
        self._reason_to_move: RequestFailed | None = None
        self._waiting: asyncio.Handle | None = None
        """The next move, or the failure of a request that was cancelled before it."""
        self._is_cancelled = self._is_superseded = False
        self._older = older
        self._named_ref = 0
        """The ref of the older request that the current replica was given."""
        self._deadline: float | None = None
        if self._may_move:
            self._keep_start(start)
        self.stream = open_stream()
        self.ref = self._send(start)

    def cancel(self) -> None:
        """Requests the early end of the request. Does nothing if it has ended. Never calls the receiver itself."""
        self._is_cancelled = True
        self.stream.cancel(self.ref)
        if self._waiting is not None:
            self._waiting.cancel()
            failure = RequestFailed(grpc.StatusCode.CANCELLED, "cancelled while its replica was gone")
            failure.finished = self._end_so_far()
            self._waiting = asyncio.get_running_loop().call_soon(self._give_up, failure)

    def update(self, update: pb.GenerationUpdate) -> None:
        """Changes the request. Does nothing if it has ended."""
        if update.HasField("priority"):
            self._start.priority = update.priority
        if update.HasField("max_tokens"):
            self._start.sampling.max_tokens = update.max_tokens
        if update.HasField("timeout_ms"):
            self._set_deadline(update.timeout_ms)
        if self._waiting is None:
            self.stream.update(self.ref, update)

    def append(self, append: pb.GenerationAppend) -> None:
        """Adds to the request. Does nothing if it has ended."""
        self._may_move = False  # another replica could not put the tokens into the same place
        self.stream.append(self.ref, append)

    def commit(self) -> None:
        """Ends the open prompt of the request. Does nothing if it has ended."""
        self.stream.commit(self.ref)

    def ref_on(self, stream: GenerateStream) -> int:
        """Returns the request's ref on a stream; 0 if it is on another one, or waits to move."""
        return self.ref if self.stream is stream and self._waiting is None else 0

    def supersede(self) -> None:
        """Cancels the request because another one took its place: its end will be ``superseded``."""
        self._is_superseded = True
        self.cancel()

    def supersede_older(self, *, is_named: bool = True) -> None:
        """Ends the older request, and those that it replaced itself. The service ends a request whose ref it was given
        and that is still on this stream; the client ends the others. ``is_named`` is false if the service was not given
        this request's own ref either."""
        older, self._older = self._older, None
        if older is not None:
            is_named = is_named and older.ref_on(self.stream) == self._named_ref != 0
            if not is_named:
                older.supersede()
            older.supersede_older(is_named=is_named)

    def put(self, event: Event) -> None:
        """Receives an event from the stream."""
        if isinstance(event, Accepted):
            self._note_accepted(event)
        elif isinstance(event, Delta) and (self._may_move or self._hides_ids):
            self._put_delta(event)
        else:
            if isinstance(event, Injected):
                self._may_move = False
            self._receiver.put(event)

    def fail(self, failure: RequestFailed) -> None:
        """Receives the failure of the request on its stream."""
        is_gone = failure.retry_rule == pb.RETRY_RULE_OTHER_REPLICA and failure.code is grpc.StatusCode.UNAVAILABLE
        is_refusal = self._num_moves > 0 and not self._is_accepted
        self._num_refusals += is_refusal and not is_gone and failure.retry_rule == pb.RETRY_RULE_NEVER
        may_move = (
            self._may_move
            and (is_gone or is_refusal)
            and not self._is_cancelled
            and not failure.is_final
            and self._num_attempts < MAX_ATTEMPTS
            and self._num_moves < MAX_MOVES
            and self._num_refusals < self._num_targets
            and self._progress.num_tokens <= MAX_TOKENS
        )
        if not may_move:
            self._give_up(failure if not is_refusal or is_gone else self._reason_to_move or failure)
            return
        self._cut.clear()
        if is_gone or self._reason_to_move is None:
            self._reason_to_move = failure
        delay_s = max(
            _DELAYS_S[self._num_attempts], min(failure.retry_after or 0.0, _DELAYS_S[-1]) if is_refusal else 0
        )
        self._num_attempts += 1
        self._waiting = asyncio.get_running_loop().call_later(delay_s, self._move)

    def _keep_start(self, start: pb.GenerationStart) -> None:
        if start.output.format in _TEXT_ONLY:
            self._hides_ids = True
            start.output.format = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
        self._start.CopyFrom(start)
        if start.HasField("timeout_ms"):
            self._set_deadline(start.timeout_ms)

    def _set_deadline(self, timeout_ms: int) -> None:
        self._deadline = asyncio.get_running_loop().time() + timeout_ms / 1000

    def _note_accepted(self, accepted: Accepted) -> None:
        self.supersede_older()
        self._progress.ticket = accepted.resume_ticket
        self._is_accepted, self._num_refusals = True, 0
        if self._accepted is None:
            self._accepted = accepted
            self._receiver.put(accepted)

    def _put_delta(self, delta: Delta) -> None:
        if delta.end is not None and delta.end.reason is FinishReason.ERROR:
            self._cut.append(delta)
            return
        self._num_attempts = 0
        self._progress.add_delta(delta)
        shown = self._shown(delta)
        has_news = shown.text or shown.reasoning or shown.tool_calls or shown.logprobs or shown.end
        if has_news or not self._hides_ids:
            self._receiver.put(shown)

    def _shown(self, delta: Delta) -> Delta:
        """Returns a delta without ids that the caller did not request."""
        if self._hides_ids:
            delta.token_ids = []
        return delta

    def _give_up(self, failure: RequestFailed) -> None:
        self._waiting = None
        for delta in self._cut:
            self._receiver.put(self._shown(delta))
        self._cut.clear()
        if self._is_superseded:
            failure.finished = failure.finished or self._end_so_far()
            failure.finished.superseded = True
        self._receiver.fail(failure)

    def _end_so_far(self) -> Finished:
        """Returns the end of a request whose replica is gone, with what the client knows of its usage."""
        usage = Usage(output_tokens=self._progress.num_tokens)
        request_id = ""
        if self._accepted is not None:
            usage.prompt_tokens, request_id = self._accepted.prompt_tokens, self._accepted.request_id
        return Finished(FinishReason.CANCELLED, usage, Timings(), request_id)

    def _send(self, start: pb.GenerationStart) -> int:
        """Sends the request on its stream. Returns its ref there."""
        self._named_ref = start.supersedes = 0 if self._older is None else self._older.ref_on(self.stream)
        return self.stream.carry(start, self)

    def _move(self) -> None:
        self._waiting = None
        self._num_moves += 1
        start = pb.GenerationStart()
        start.CopyFrom(self._start)
        if self._progress.ticket:
            resumed = pb.ResumeFrom(ticket=self._progress.ticket, choices=self._progress.choices)
            start.resume_from.CopyFrom(resumed)
        if self._deadline is not None:
            start.timeout_ms = max(1, round((self._deadline - asyncio.get_running_loop().time()) * 1000))
        self._is_accepted = False
        try:
            self.stream = self._open_stream(self.stream)
            self.ref = self._send(start)
        except Exception:  # the client was closed
            self._give_up(self._reason_to_move or RequestFailed(grpc.StatusCode.UNAVAILABLE, "the service is gone"))
            return
        self._on_move()
        _log.warning(
            "request %s: %s; it continues on another stream after %d tokens",
            self._accepted.request_id if self._accepted is not None else "(not accepted)",
            self._reason_to_move,
            self._progress.num_tokens,
        )
