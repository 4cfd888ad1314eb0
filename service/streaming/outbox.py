"""The pending output of one stream, and the one task that writes it: at most one message per step.

Sinks add events synchronously and without waiting. One message has a step's output for all requests of the stream. With
very many streams a message waits a little and so has the output of several steps, because each message costs the event
loop 25 to 64 microseconds, whatever its contents. A stream that is read more slowly than it fills is stalled: its
requests are paused until it has drained. Knows neither the engine nor requests.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.scheduler.request import PromptLogprobsChunk, SequenceDelta
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming.buffer_budget import BufferBudget, WritePacer
from penstock.service.streaming.pacing import AT_ONCE, NEVER, WriteTimer
from penstock.service.streaming.pending_message import (
    MAX_PART_BYTES,
    PART_BYTES,
    OutputForm,
    PendingMessage,
    delta_bytes,
    logprobs_bytes,
    split,
    split_delta,
)

MAX_STALLED_BYTES = 16 << 20
"""The maximum number of pending bytes of a stalled stream. Output that is already on its way is far less. Only a client
that keeps sending requests without reading their refusals reaches this limit."""
STALLED_S = 60.0
"""A stalled stream whose reader takes nothing for this long is cut off."""
SLOWEST_BYTES_PER_S = 1 << 10
"""The slowest accepted reader. It has the additional time that it needs for a message."""
HEARTBEAT_S = 10.0
ACCEPTED_WAIT_S = 0.005
"""The longest time for which ``accepted`` waits, to be sent with the first token."""
BLOCKED_S = 0.1
"""A write that takes longer is held up by the stream's reader."""
HELD_UP_PART_BYTES = 8 << 10
"""The size of messages while a write is held up. They are smaller because parts take ten times the memory of a finished
message, and so that a slow reader is not mistaken for one that has gone."""


class RequestReceiver(Protocol):
    """Receives a request's events, synchronously and in order."""

    def accepted(self, accepted: pb.Accepted) -> None:
        """Called when the request is in the queue."""

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk, form: OutputForm) -> None:
        """Called with each part of the prompt's log-probabilities."""

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Called with new output; ``at_once`` for a first token."""

    def injected(self, injected: pb.Injected) -> None:
        """Called when tokens were injected into the output."""

    def finished(self, finished: pb.Finished) -> None:
        """Called when the request has ended."""

    def fail(self, error: Exception) -> None:
        """Ends the request's call with ``error``. Called when its events can no longer be delivered in order."""


class Outbox:
    """The pending output of one stream. All methods but ``run`` are synchronous and belong to the event loop."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        encode: Callable[[PendingMessage], Sequence[Message]],
        pacer: WritePacer,
        buffer_budget: BufferBudget,
        state: Callable[[], "pb.ServiceState.ValueType"],
        on_stall: Callable[[bool], None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """``encode`` builds messages and ``write`` sends one, serialized; ``state`` returns the state for a heartbeat.
        ``on_stall`` is called with True when the stream should get no more output, and with False when it has drained,
        but never during a call of this object's methods."""
        self._write = write
        self._encode = encode
        self._pacer = pacer
        self._buffer_budget = buffer_budget
        self._state = state
        self._on_stall = on_stall
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._ready: deque[bytes] = deque()
        """Full messages, serialized: they take a tenth of the memory of their parts."""
        self._batch: PendingMessage | None = None
        """The message that the next part joins."""
        self._pending_bytes = 0
        """The size of both, and of the message that is being written."""
        self._write_timer = WriteTimer()
        """Fires when the next message is to be sent, at the earliest time that one of its parts needs."""
        self._num_live = 0
        self._is_active = False  # as the pacer knows it
        self.is_closed = False
        """Whether no more events will be added. Changed by ``close``."""
        self._last_word: Exception | None = None
        self._failure: Exception | None = None
        self._was_cut = False
        """Whether this object cancelled a write."""
        self._next_beat: asyncio.TimerHandle | None = None
        self._sends_beats = True
        self._writer: asyncio.Task[None] | None = None
        """The task of ``run``, while it is inside ``write``."""
        self._last_write = self._loop.time()
        self.is_stalled = False
        """Whether the stream should get no output for now."""
        self._last_taken = 0.0
        """The last time at which the reader of a stalled stream took a message."""
        self._writing_bytes = 0
        self._reader_watch: asyncio.TimerHandle | None = None

    # --------------------------------------------------------------------------------------------------------- input

    def opened(self) -> None:
        """Counts a new live request on the stream."""
        self._set_live(self._num_live + 1)

    def accepted(self, accepted: pb.Accepted) -> None:
        """Sent with the first output, unless that takes long."""
        self._room(PART_BYTES + accepted.ByteSize()).accepted.append(accepted)
        self._write_timer.set(max(self._last_write + self._pacer.interval, self._loop.time() + ACCEPTED_WAIT_S))

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk, form: OutputForm) -> None:
        """Sent in several parts if it does not fit in one message."""
        for piece in split(part, form):
            num_bytes = PART_BYTES + logprobs_bytes(piece.logprobs, piece.token_ids, form)
            self._room(num_bytes).prompt_logprobs.append((ref, form, piece))
        self._write_timer.set(self._last_write + self._pacer.interval)

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Joined with pending deltas of the same choice. Sent in several parts if it does not fit in one message."""
        num_bytes = delta_bytes(delta, form)
        if not num_bytes:
            return
        if num_bytes <= MAX_PART_BYTES:
            self._put_delta(ref, delta, form, num_bytes)
        else:
            for part in split_delta(delta, form):
                self._put_delta(ref, part, form, delta_bytes(part, form))
        self._write_timer.set(AT_ONCE if at_once else self._last_write + self._pacer.interval)

    def _put_delta(self, ref: int, delta: SequenceDelta, form: OutputForm, num_bytes: int) -> None:
        _, deltas = self._room(num_bytes).deltas.setdefault((ref, delta.choice), (form, []))
        deltas.append(delta)

    def finished(self, finished: pb.Finished) -> None:
        """Sent at once. The request is no longer live on the stream."""
        self._room(PART_BYTES + finished.ByteSize()).finished.append(finished)
        self._set_live(max(self._num_live - 1, 0))
        self._write_timer.set(AT_ONCE)

    def injected(self, injected: pb.Injected) -> None:
        """Sent in a message of its own with the deltas that follow: those in earlier messages come before."""
        if self._batch is not None:
            self._close_batch()
        self._room(PART_BYTES + injected.ByteSize()).injected.append(injected)
        self._write_timer.set(AT_ONCE)

    def frame_refused(self, refused: pb.FrameRefused) -> None:
        self._room(PART_BYTES + refused.ByteSize()).frames_refused.append(refused)
        self._write_timer.set(AT_ONCE)

    def heartbeat(self) -> None:
        """Sends the service's state at once."""
        self._room(PART_BYTES).heartbeat = pb.Heartbeat(state=self._state())
        self._write_timer.set(AT_ONCE)

    def begin_beats(self, *, sends: bool = True) -> None:
        """Starts the timer that cuts off a reader that leaves the rest of ended requests unread. With ``sends``, a
        heartbeat is sent whenever no message has been sent for the interval."""
        self._sends_beats = sends
        self._next_beat = self._loop.call_later(self._heartbeat_s, self._beat)

    def close(self, error: Exception | None = None) -> None:
        """Ends the input. When all pending output is written, ``run`` returns, or raises ``error``."""
        self.is_closed = True
        self._last_word = self._last_word or error
        self._write_timer.ring()

    def fail(self, error: Exception) -> None:
        """Drops pending output and ends ``run`` with ``error``, even while a reader holds it up. The first error
        counts."""
        if self._failure is not None:
            return
        self._failure = error
        self._drop_pending()
        self._write_timer.ring()
        # A write that is not held up must not be cancelled: gRPC could send no status after half a message.
        self._loop.call_later(BLOCKED_S, self._cut)

    # -------------------------------------------------------------------------------------------------------- output

    async def run(self) -> None:
        """Writes until the outbox is closed and empty. Raises what ``write`` raises, or the error given to ``fail``."""
        task = asyncio.current_task()
        assert task is not None
        try:
            while await self._wait():
                await self._write_next(task)
        finally:
            self._abandon()

    async def _write_next(self, task: "asyncio.Task[None]") -> None:
        if not self._ready:
            self._close_batch()
        if self._failure is not None:
            raise self._failure
        if not self._ready:  # there was nothing to send
            self._write_timer.reset(NEVER)
            return
        raw = self._ready.popleft()
        self._write_timer.reset(AT_ONCE if self._has_more else NEVER)
        self._last_write = self._loop.time()
        self._writer, self._writing_bytes = task, len(raw)
        try:
            await self._write(raw)
        except asyncio.CancelledError:
            if self._was_cut and self._failure is not None and task.uncancel() == 0:
                raise self._failure from None
            raise
        finally:
            self._writer, self._writing_bytes = None, 0
            self._count(-len(raw))
        if self.is_stalled:
            self._last_taken = self._loop.time()
            if self._pending_bytes <= self._buffer_budget.threshold(self._num_live) // 2:
                self._set_stalled(False)

    async def _wait(self) -> bool:
        """Waits until a message is due; returns False when there are no more messages."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._has_more and (self.is_closed or self._write_timer.is_due):
                return True
            if self.is_closed:
                if self._last_word is not None:
                    raise self._last_word
                return False
            await self._write_timer.wait()

    @property
    def _has_more(self) -> bool:
        return bool(self._ready) or self._batch is not None

    def _room(self, num_bytes: int) -> PendingMessage:
        """Returns the pending message that a part of ``num_bytes`` joins."""
        if self._failure is not None or self.is_closed:
            return PendingMessage()  # never sent
        self._pending_bytes += num_bytes
        self._buffer_budget.num_bytes += num_bytes
        # Both cases are rare: a step's output is smaller, and is written before the next step's arrives.
        if self._pending_bytes > (MAX_PART_BYTES if self._writer is None else HELD_UP_PART_BYTES):
            self._keep_bounds(num_bytes)
        batch = self._batch
        if batch is None:
            batch = self._batch = PendingMessage()
        batch.num_bytes += num_bytes
        return batch

    def _keep_bounds(self, num_bytes: int) -> None:
        """Applies the limits on the message that grows by ``num_bytes``, and on all pending output including them."""
        if not self.is_stalled and self._pending_bytes > self._buffer_budget.threshold(self._num_live):
            self._set_stalled(True)
        elif self._pending_bytes > MAX_STALLED_BYTES:
            self.fail(ServiceError(Reason.READER_TOO_SLOW))
        is_held_up = self._writer is not None and self._loop.time() > self._last_write + BLOCKED_S
        most = HELD_UP_PART_BYTES if is_held_up else MAX_PART_BYTES
        if self._batch is not None and self._batch.num_bytes + num_bytes > most:
            self._close_batch()
            self._write_timer.set(AT_ONCE)

    def _close_batch(self) -> None:
        """Serializes the pending message; later parts join the next one."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        try:
            raws = [message.SerializeToString() for message in self._encode(batch)]
        except Exception as error:
            self.fail(error)  # not raised to the caller: the stream is broken, not the added part
            return
        self._ready.extend(raws)
        self._count(sum(map(len, raws)) - batch.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._pending_bytes += num_bytes
        self._buffer_budget.num_bytes += num_bytes

    def _drop_pending(self) -> None:
        """Drops all pending output except the message that is being written."""
        self._ready.clear()
        self._batch = None
        self._count(self._writing_bytes - self._pending_bytes)
        if self._reader_watch is not None:
            self._reader_watch.cancel()

    # -------------------------------------------------------------------------------------------------- slow readers

    def _set_stalled(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        self._count_active()
        # Called later: the caller may be the engine, which must not be changed while it delivers a step's output.
        self._loop.call_soon(self._on_stall, is_stalled)
        if is_stalled:
            self._last_taken = self._loop.time()
            self._reader_watch = self._loop.call_later(STALLED_S, self._watch_reader)
            self._loop.call_soon(self._close_batch)  # no more output will arrive for a while
        elif self._reader_watch is not None:
            self._reader_watch.cancel()

    def _watch_reader(self) -> None:
        patience = STALLED_S + self._writing_bytes / SLOWEST_BYTES_PER_S
        left = self._last_taken + patience - self._loop.time()
        if left <= 0:
            self.fail(ServiceError(Reason.READER_TOO_SLOW))
        else:
            self._reader_watch = self._loop.call_later(left, self._watch_reader)

    def _cut(self) -> None:
        if self._writer is not None:
            self._was_cut = True
            self._writer.cancel()

    def _beat(self) -> None:
        idle = self._loop.time() - self._last_write
        if (
            not self._num_live
            and self._writer is not None
            and idle > STALLED_S + self._writing_bytes / SLOWEST_BYTES_PER_S
        ):
            # Too little is pending for the stream to be stalled, but all requests have ended and the rest is not read.
            self.fail(ServiceError(Reason.READER_TOO_SLOW))
        if not self._sends_beats:
            idle = 0.0
        elif idle >= self._heartbeat_s and self._writer is None and not self._has_more:
            self.heartbeat()
            idle = 0.0
        self._next_beat = self._loop.call_later(max(self._heartbeat_s - idle, 0.01), self._beat)

    def _abandon(self) -> None:
        """Stops writing: further output is dropped."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        self.is_closed = True
        self._drop_pending()
        self._set_live(0)
        # They refer to the outbox's owner: reference cycles, which would remain until the garbage collector runs.
        self._write, self._on_stall = _nowhere, lambda _: None
        self._failure = self._last_word = None  # and their tracebacks refer to frames that refer to the outbox

    def _set_live(self, num_live: int) -> None:
        self._num_live = num_live
        self._count_active()

    def _count_active(self) -> None:
        """Counts the stream as active if it has live requests and is not stalled: a stalled one has little to write."""
        is_active = self._num_live > 0 and not self.is_stalled
        self._pacer.add_streams(is_active - self._is_active)
        self._is_active = is_active


async def _nowhere(message: object) -> None:
    """The ``write`` of an outbox that is done."""
