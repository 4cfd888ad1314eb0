"""What waits to be written to one stream, and the one task that writes it: at most one message a step.

Sinks put events in, synchronously and without waiting; what a step brought to all requests of the stream leaves as one
message. Under very many streams a message waits a little, and so carries several steps: a message costs the loop 25 to
64 microseconds, whatever is in it. A stream that is read more slowly than it fills is stalled: whoever fills it is told
to stop, and to go on when it has drained. Knows neither the engine nor what a request is.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from google.protobuf.message import Message

from penstock.scheduler.request import PromptLogprobsChunk, SequenceDelta
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming.backlog import BufferBudget, WritePacer
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
from penstock.v1 import generation_pb2 as pb

MAX_STALLED_BYTES = 16 << 20
"""Of a stream that is told to stop. What was under way then is far less; a client that goes on and on sending requests,
and does not read that they are refused, gets here."""
STALLED_S = 60.0
"""A stalled stream that takes nothing for so long is cut off."""
SLOWEST_BYTES_PER_S = 1 << 10
"""A reader of this speed takes longer over a message, and is given that time as well."""
HEARTBEAT_S = 10.0
ACCEPTED_WAIT_S = 0.005
"""How long ``accepted`` waits for a first token to go with."""
BLOCKED_S = 0.1
"""A write that takes longer is held up by the stream's reader."""
HELD_UP_PART_BYTES = 8 << 10
"""Then messages are smaller: until one is full its parts take ten times the memory, and a slow reader is not taken for
one that is gone."""


class RequestReceiver(Protocol):
    """Takes what one request brings, synchronously and in order."""

    def accepted(self, accepted: pb.Accepted) -> None:
        """The request is in the queue."""
        ...

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk) -> None:
        """A part of the prompt's log-probabilities."""
        ...

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """New output; ``at_once`` for a first token."""
        ...

    def finished(self, finished: pb.Finished) -> None:
        """The request is over."""
        ...

    def fail(self, error: Exception) -> None:
        """Nothing more can be received in order: ends whatever carries the request with ``error``."""
        ...


class Outbox:
    """The pending output of one stream. All methods but ``run`` are synchronous and belong to the event loop."""

    def __init__(
        self,
        write: Callable[[bytes], Awaitable[None]],
        encode: Callable[[PendingMessage], Message],
        pacer: WritePacer,
        backlog: BufferBudget,
        state: Callable[[], "pb.ServiceState.ValueType"],
        on_stall: Callable[[bool], None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """``write`` sends a message as the wire has it, ``encode`` makes it, ``state`` is what a heartbeat tells.
        ``on_stall`` is told True when the stream should get nothing more, and False when it has drained; never amid a
        call of ours."""
        self._write = write
        self._encode = encode
        self._pacer = pacer
        self._backlog = backlog
        self._state = state
        self._on_stall = on_stall
        self._heartbeat_s = heartbeat_s
        self._loop = asyncio.get_running_loop()
        self._ready: deque[bytes] = deque()
        """Messages that are full, as the wire has them: a tenth of the memory that their parts took."""
        self._batch: PendingMessage | None = None
        """What comes next joins it."""
        self._pending_bytes = 0
        """Of both, and of the message that is being written."""
        self._alarm = WriteTimer()
        """Rings when the next message leaves: what hurries most decides."""
        self._num_live = 0
        self._is_active = False  # as the pacer knows it
        self._closed = False
        self._last_word: Exception | None = None
        self._failure: Exception | None = None
        self._was_cut = False
        """Whether it was us who cancelled a write."""
        self._next_beat: asyncio.TimerHandle | None = None
        self._writer: asyncio.Task[None] | None = None
        """The task of ``run``, while it is inside ``write``."""
        self._last_write = self._loop.time()
        self.is_stalled = False
        """Whether it should get nothing more for the time being."""
        self._last_taken = 0.0
        """While it is stalled: when its reader last took something."""
        self._writing_bytes = 0
        self._reader_watch: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------- what goes in

    def opened(self) -> None:
        """A request begins to live on the stream."""
        self._set_live(self._num_live + 1)

    def accepted(self, accepted: pb.Accepted) -> None:
        """Goes with the first output, unless that takes long."""
        self._room(PART_BYTES + accepted.ByteSize()).accepted.append(accepted)
        self._alarm.set(max(self._last_write + self._pacer.interval, self._loop.time() + ACCEPTED_WAIT_S))

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk) -> None:
        """In several parts, where one message can't hold it."""
        for piece in split(part):
            self._room(PART_BYTES + logprobs_bytes(piece.logprobs)).prompt_logprobs.append((ref, piece))
        self._alarm.set(self._last_write + self._pacer.interval)

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        """Joins what waits of the same choice, if anything does. In several parts, where one message can't hold it."""
        num_bytes = delta_bytes(delta, form)
        if not num_bytes:
            return
        if num_bytes <= MAX_PART_BYTES:
            self._put_delta(ref, delta, form, num_bytes)
        else:
            for part in split_delta(delta, form):
                self._put_delta(ref, part, form, delta_bytes(part, form))
        self._alarm.set(AT_ONCE if at_once else self._last_write + self._pacer.interval)

    def _put_delta(self, ref: int, delta: SequenceDelta, form: OutputForm, num_bytes: int) -> None:
        deltas = self._room(num_bytes).deltas
        key = (ref, delta.choice)
        waiting = deltas.get(key)
        if waiting is None:
            deltas[key] = (form, [delta])
        else:
            waiting[1].append(delta)

    def finished(self, finished: pb.Finished) -> None:
        """Goes at once; the request no longer lives on the stream."""
        self._room(PART_BYTES + finished.ByteSize()).finished.append(finished)
        self._set_live(max(self._num_live - 1, 0))
        self._alarm.set(AT_ONCE)

    def update_refused(self, refused: pb.UpdateRefused) -> None:
        """Goes at once."""
        self._room(PART_BYTES + refused.ByteSize()).update_refused.append(refused)
        self._alarm.set(AT_ONCE)

    def heartbeat(self) -> None:
        """Tells the service's state, at once."""
        self._room(PART_BYTES).heartbeat = pb.Heartbeat(state=self._state())
        self._alarm.set(AT_ONCE)

    def begin_beats(self) -> None:
        """From here on a heartbeat leaves whenever nothing else has for its time."""
        self._next_beat = self._loop.call_later(self._heartbeat_s, self._beat)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will come."""
        return self._closed

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will come: when all is written ``run`` returns, or raises ``error``."""
        self._closed = True
        self._last_word = self._last_word or error
        self._alarm.ring()

    def fail(self, error: Exception) -> None:
        """Drops what waits and ends ``run`` with ``error``, even while a reader holds it up. The first error counts."""
        if self._failure is not None:
            return
        self._failure = error
        self._drop_pending()
        self._alarm.ring()
        # A write that is not held up must not be cancelled: gRPC could send no status after half a message.
        self._loop.call_later(BLOCKED_S, self._cut)

    # ------------------------------------------------------------------------------------------------ what comes out

    async def run(self) -> None:
        """Writes until the outbox is closed and empty. Raises what ``write`` raises, or what ``fail`` was given."""
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
        raw = self._ready.popleft()
        self._alarm.reset(AT_ONCE if self._has_more else NEVER)
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
            if self._pending_bytes <= self._backlog.threshold() // 2:
                self._set_stalled(False)

    async def _wait(self) -> bool:
        """Waits until a message is due; False when there will be none any more."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._has_more and (self._closed or self._alarm.is_due):
                return True
            if self._closed:
                if self._last_word is not None:
                    raise self._last_word
                return False
            await self._alarm.wait()

    @property
    def _is_held_up(self) -> bool:
        return self._writer is not None and self._loop.time() > self._last_write + BLOCKED_S

    @property
    def _has_more(self) -> bool:
        return bool(self._ready) or self._batch is not None

    def _room(self, num_bytes: int) -> PendingMessage:
        """The batch that takes a part of so many bytes."""
        if self._failure is not None or self._closed:
            return PendingMessage()  # nobody will read it
        self._pending_bytes += num_bytes
        self._backlog.num_bytes += num_bytes
        # Both are rare: what a step brings is less, and is written before the next one comes.
        if self._pending_bytes > (MAX_PART_BYTES if self._writer is None else HELD_UP_PART_BYTES):
            self._keep_bounds(num_bytes)
        batch = self._batch
        if batch is None:
            batch = self._batch = PendingMessage()
        batch.num_bytes += num_bytes
        return batch

    def _keep_bounds(self, num_bytes: int) -> None:
        """Of the message that would take so many bytes more, and of all that is pending, with them."""
        if not self.is_stalled and self._pending_bytes > self._backlog.threshold():
            self._set_stalled(True)
        elif self._pending_bytes > MAX_STALLED_BYTES:
            self.fail(ServiceError(Reason.READER_TOO_SLOW))
        most = HELD_UP_PART_BYTES if self._is_held_up else MAX_PART_BYTES
        if self._batch is not None and not self._batch.has_room(num_bytes, most):
            self._close_batch()
            self._alarm.set(AT_ONCE)

    def _close_batch(self) -> None:
        """Makes it a message: nothing more joins it."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        try:
            raw = self._encode(batch).SerializeToString()
        except Exception as error:
            self.fail(error)  # not to whoever put something in: it is the stream that is broken
            return
        self._ready.append(raw)
        self._count(len(raw) - batch.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._pending_bytes += num_bytes
        self._backlog.num_bytes += num_bytes

    def _drop_pending(self) -> None:
        """All but what is being written."""
        self._ready.clear()
        self._batch = None
        self._count(self._writing_bytes - self._pending_bytes)
        if self._reader_watch is not None:
            self._reader_watch.cancel()

    # -------------------------------------------------------------------------------------------- a reader too slow

    def _set_stalled(self, is_stalled: bool) -> None:
        self.is_stalled = is_stalled
        self._count_active()
        # Later: this may be the engine that puts in what a step brought, and it must not be changed amid that.
        self._loop.call_soon(self._on_stall, is_stalled)
        if is_stalled:
            self._last_taken = self._loop.time()
            self._reader_watch = self._loop.call_later(STALLED_S, self._watch_reader)
            self._loop.call_soon(self._close_batch)  # for a while nothing more will come
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
            # It is less than what makes a stream stalled, but all requests have ended, and nobody reads what is left.
            self.fail(ServiceError(Reason.READER_TOO_SLOW))
        if idle >= self._heartbeat_s and self._writer is None and not self._has_more:
            self.heartbeat()
            idle = 0.0
        self._next_beat = self._loop.call_later(max(self._heartbeat_s - idle, 0.01), self._beat)

    def _abandon(self) -> None:
        """Nothing is written any more: what requests still bring is dropped."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._closed = True
        self._drop_pending()
        self._set_live(0)
        # They know whoever has this outbox: circles, which would be there until the cycle collector comes by.
        self._write, self._on_stall = _nowhere, _nobody
        self._failure = self._last_word = None  # and their tracebacks know the frames that know it

    def _set_live(self, num_live: int) -> None:
        self._num_live = num_live
        self._count_active()

    def _count_active(self) -> None:
        """A stream with live requests counts for the pace of all, unless it is stalled: then it has little to write."""
        is_active = self._num_live > 0 and not self.is_stalled
        self._pacer.add_streams(is_active - self._is_active)
        self._is_active = is_active


async def _nowhere(message: object) -> None:
    """Where an outbox writes that is done."""


def _nobody(is_stalled: bool) -> None:
    """Whom it tells of a reader that is slow."""
