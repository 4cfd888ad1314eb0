"""One open Generate stream that carries many requests: refs, a task that writes, a task that reads and distributes."""

import asyncio
import copy
import itertools
from collections.abc import Callable, Coroutine
from typing import Protocol, TypeVar

import grpc

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed, StreamBroken, failure_from_call, failure_from_status
from penstock.clients.events import Accepted, Delta, Event, Finished, FrameRefused, Injected, PromptLogprobs, merge

T = TypeVar("T")
Call = grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse]

MAX_EVENTS_WAITING = 64
"""The limit of queued events per request. Further events are merged into the queued ones: a slow consumer gets fewer,
larger events, its queue is bounded by the request's output, and no other request is delayed."""

_CLOSING_SECONDS = 1.0


class Receiver(Protocol):
    """Receives the events of one request. The reader calls it as they arrive; it must not block."""

    def put(self, event: Event) -> None:
        """Receives an event; ``Finished`` is the last one."""

    def fail(self, failure: RequestFailed) -> None:
        """Receives the failure of the request; nothing follows it."""


class Mailbox:
    """Queues events from the reader for one request's consumer."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._failure: RequestFailed | None = None
        self._is_over = False
        self._wants_rest = False
        self._news = asyncio.Event()
        self.request_id = ""
        """The service's id of the request; empty until it is accepted."""
        self.abandoned = False
        """Whether the consumer is gone; further events are dropped."""

    def put(self, event: Event) -> None:
        """Adds an event; never waits."""
        if self.abandoned:
            return
        self._events.append(event)
        if len(self._events) > MAX_EVENTS_WAITING:
            self._events = merge(self._events)
        if isinstance(event, Accepted):
            self.request_id = event.request_id
        elif isinstance(event, Finished):
            self._is_over = True
        if self._is_over or not self._wants_rest:
            self._news.set()

    def fail(self, failure: RequestFailed) -> None:
        """Ends the request: ``take`` raises this after the last event."""
        failure.request_id = failure.request_id or self.request_id
        self._failure = failure
        self._is_over = True
        self._news.set()

    async def take_event(self, *, rest: bool = False) -> list[Event]:
        """Waits for events and returns all that are queued; with ``rest``, waits until the end, which wakes the
        consumer only once. Raises the failure when no events are left."""
        self._wants_rest = rest
        while not self._is_over and (rest or not self._events):
            self._news.clear()
            await self._news.wait()
        if not self._events and self._failure is not None:
            raise self._failure
        events, self._events = self._events, []
        return events


class _FirstStatus:
    """Records a call's status when it is first set: grpc.aio replaces it by an INTERNAL of its own if a write fails
    because the call has ended (grpc/grpc#36066)."""

    def __init__(self, call: Call) -> None:
        self._noted: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns the service's status if ``error`` replaced it, otherwise ``error``."""
        if not self._is_replacement(error):
            return error
        if self._noted is None or self._is_replacement(self._noted):
            return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="the stream ended while it was written to")
        return self._noted

    def _note(self, call: Call) -> None:
        if self._noted is None:
            self._noted = grpc.aio.AioRpcError(
                _ready(call.code()),
                trailing_metadata=_ready(call.trailing_metadata()),
                details=_ready(call.details()),
            )

    @staticmethod
    def _is_replacement(error: grpc.aio.AioRpcError) -> bool:
        return error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


def _ready(coroutine: Coroutine[object, object, T]) -> T:
    """Returns the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the coroutine waits")


class GenerateStream:
    """Carries requests until it breaks or is closed. A broken stream is not repaired; its owner opens a new one."""

    def __init__(self, open_call: Callable[[], Call], target: str, channel: grpc.aio.Channel | None = None) -> None:
        """``channel`` is that of ``open_call``, by which its owner leaves a target."""
        self._target = target
        self.channel = channel
        self._live: dict[int, Receiver] = {}
        self._refs = itertools.count(1)
        self._outgoing: asyncio.Queue[pb.GenerateRequest | None] = asyncio.Queue()
        self.is_open = True
        self._is_left = False
        self._call = open_call()
        self._status = _FirstStatus(self._call)
        self._writer = asyncio.create_task(self._write(), name="penstock-generate-writer")
        self._reader = asyncio.create_task(self._read(), name="penstock-generate-reader")

    def carry(self, start: pb.GenerationStart, receiver: Receiver) -> int:
        """Sends a request and returns its ref. Never waits; unwritten messages are kept in memory."""
        assert self.is_open
        ref = next(ref for number in self._refs if (ref := number % 2**32) and ref not in self._live)
        start.ref = ref
        self._live[ref] = receiver
        self._outgoing.put_nowait(pb.GenerateRequest(start=start))
        return ref

    def cancel(self, ref: int) -> None:
        """Requests the early end of a request; its ``Finished`` still arrives. Does nothing if it has ended."""
        if self.is_open and ref in self._live:
            self._outgoing.put_nowait(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[ref])))

    def update(self, ref: int, update: pb.GenerationUpdate) -> None:
        """Changes a request. Does nothing if it has ended."""
        if self.is_open and ref in self._live:
            update.ref = ref
            self._outgoing.put_nowait(pb.GenerateRequest(update=update))

    def append(self, ref: int, append: pb.GenerationAppend) -> None:
        """Adds to a request. Does nothing if it has ended."""
        if self.is_open and ref in self._live:
            append.ref = ref
            self._outgoing.put_nowait(pb.GenerateRequest(append=append))

    def commit(self, ref: int) -> None:
        """Ends the open prompt of a request. Does nothing if it has ended."""
        if self.is_open and ref in self._live:
            self._outgoing.put_nowait(pb.GenerateRequest(commit=pb.GenerationCommit(ref=ref)))

    def leave(self) -> None:
        """Ends the stream once it has no request. No further one may be carried."""
        self._is_left = True
        self._end_if_left()

    def _end_if_left(self) -> None:
        if self._is_left and not self._live and self.is_open:
            self._outgoing.put_nowait(None)

    async def close(self, failure: RequestFailed | None = None) -> None:
        """Cancels live requests, lets the service end the stream, and aborts it after a second. ``failure`` is the
        exception that live requests raise; by default, that the client was closed."""
        if self.is_open:
            if self._live:
                self._outgoing.put_nowait(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=list(self._live))))
            self._outgoing.put_nowait(None)
            self._break(failure or RequestFailed(grpc.StatusCode.CANCELLED, "the client was closed"))
        await asyncio.wait({self._reader}, timeout=_CLOSING_SECONDS)
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait({self._reader, self._writer})

    async def _write(self) -> None:
        # Runs in its own task, since grpc.aio cancels the whole call if the task that awaits write() is cancelled.
        try:
            while (frame := await self._outgoing.get()) is not None:
                await self._call.write(frame)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader gets the reason

    async def _read(self) -> None:
        failure: RequestFailed = StreamBroken(grpc.StatusCode.UNAVAILABLE, "the service ended the stream")
        try:
            async for response in self._call:
                self._distribute(response)
        except grpc.aio.AioRpcError as error:
            ended = self._status.of(error)
            if ended.code() is not grpc.StatusCode.OK:
                failure = failure_from_call(ended, self._target, StreamBroken)
        finally:  # whatever was raised, no request waits forever
            self._break(failure)
            self._writer.cancel()
            self._call.cancel()

    def _break(self, failure: RequestFailed) -> None:
        self.is_open = False
        live, self._live = self._live, {}
        for receiver in live.values():
            receiver.fail(copy.copy(failure))  # each is raised in a different task

    def _distribute(self, response: pb.GenerateResponse) -> None:
        for accepted in response.accepted:
            self._put(accepted.ref, Accepted.from_proto(accepted))
        for part in response.prompt_logprobs:
            self._put(part.ref, PromptLogprobs.from_proto(part))
        for injected in response.injected:
            self._put(injected.ref, Injected.from_proto(injected))
        for delta in response.deltas:
            self._put(delta.ref, Delta.from_proto(delta))
        for refused in response.frames_refused:
            self._put(refused.ref, FrameRefused.from_proto(refused))
        for finished in response.finished:
            self._finish(finished)

    def _put(self, ref: int, event: Event) -> None:
        if (receiver := self._live.get(ref)) is not None:
            receiver.put(event)

    def _finish(self, message: pb.Finished) -> None:
        receiver = self._live.pop(message.ref, None)
        self._end_if_left()
        if receiver is None:
            return
        finished = Finished.from_proto(message)
        if message.status.code != 0:
            failure = failure_from_status(message.status, message.request_id)
            failure.finished = finished
            receiver.fail(failure)
        else:
            receiver.put(finished)
