"""Calls that need one vector for each input: embeddings, whose vectors are streamed, classes and scores. Each is one
request. The call's own task does all steps: it checks, prepares and queues the request, and removes it from the engine
however the call ends.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import Embedded, EngineFinishReason, Event, Request, RequestAccepted, RequestFinished
from penstock.service.auth.identity import current_principal
from penstock.service.errors import Reason, ServiceError, StatusError, code_of, ending_status, from_exception
from penstock.service.requests.preparation import Origin, preparation_limit, unqueued_end
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.load_report import current_cost
from penstock.service.rpc.routing_metadata import ROUTING_METADATA, RoutingMetadata
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import NO_SPAN, Telemetry
from penstock.service.transport.call_end import write

_MAX_VALUES_ON_LOOP = 8192
"""Responses that take more work are built in a thread."""
MAX_KEPT_BYTES = 256 << 20
"""Limit on the vectors of all calls that are computed and not sent yet. A call has many if its client reads slowly, or
if one of its first inputs is by far the longest."""

RequestT = TypeVar("RequestT", bound=Any)
ResponseT = TypeVar("ResponseT")
RequestT_contra = TypeVar("RequestT_contra", bound=Any, contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", covariant=True)
_TOO_SLOW = "too many vectors wait, unread or for that of an earlier input; read faster, or send fewer inputs at once"


class PooledRequestBuilder(Protocol[RequestT_contra]):
    """What differs between the methods."""

    operation: str
    """The name of the operation in metrics and traces."""

    def check(self, request: RequestT_contra) -> None:
        """Makes all checks that are possible before the inputs are tokenized. Raises ServiceError."""

    async def prepare(self, request: RequestT_contra, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""

    def kept(self, request: RequestT_contra, vector: bytes) -> bytes:
        """Returns what a response needs of a vector. Fast, since it runs on the event loop."""

    def work(self, request: RequestT_contra) -> int:
        """Returns the work of building a response for each input, in values that are read."""


class WholeResponseBuilder(PooledRequestBuilder[RequestT_contra], Protocol[RequestT_contra, ResponseT_co]):
    """What differs between the methods with one response."""

    def response(
        self, request: RequestT_contra, request_id: str, usage: pb.Usage, vectors: Sequence[bytes]
    ) -> ResponseT_co:
        """Returns the response for what ``kept`` returned, in the order of the inputs."""


class StreamedResponseBuilder(PooledRequestBuilder[RequestT_contra], Protocol[RequestT_contra]):
    """What differs between the methods that stream."""

    def num_in_message(self, request: RequestT_contra) -> int:
        """Returns how many inputs' vectors a message holds, at least 1."""

    def message(
        self, request: RequestT_contra, request_id: str, first: int, vectors: Sequence[bytes], usage: pb.Usage | None
    ) -> Message:
        """Returns the message for what ``kept`` returned, in the order of the inputs, from the one with the index
        ``first``. ``usage`` is None except in the last message."""


class PooledCalls:
    """Serves the calls, and knows those that are live."""

    def __init__(self, engine: Engine, telemetry: Telemetry, metadata: RoutingMetadata = ROUTING_METADATA) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._metadata = metadata
        self._live: set[_LiveCall] = set()
        self._kept_bytes = 0
        """The bytes of all vectors that are computed and not sent yet."""

    @property
    def num_live(self) -> int:
        """The number of requests that have started and not ended, including those in preparation."""
        return len(self._live)

    async def serve(
        self,
        builder: WholeResponseBuilder[RequestT, ResponseT],
        request: RequestT,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> ResponseT:
        """Returns the response of one call. Raises ServiceError, Refused and StatusError."""
        live = self._begin(builder, request, context)
        response: ResponseT = await self._run(live, partial(live.whole, builder.response))
        return response

    async def stream(
        self,
        builder: StreamedResponseBuilder[RequestT],
        request: RequestT,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Writes the messages of one call. Before the first one, nothing is sent, so that clients and proxies may retry
        a refused call. Raises ServiceError, Refused and StatusError."""
        live = self._begin(builder, request, context)
        has_begun = False

        async def send(raw: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                await context.send_initial_metadata(())
            await write(context, raw)

        await self._run(live, partial(live.send_all, builder, send))

    def shut_down(self) -> None:
        """Ends every queued or running request. The engine refuses those that are still in preparation."""
        for live in list(self._live):
            live.abort(EngineFinishReason.SHUTDOWN)

    def count(self, num_bytes: int) -> None:
        """Adds to the bytes of vectors that are kept. If there are too many, the largest call ends of the tenant that
        has the most."""
        self._kept_bytes += num_bytes
        if num_bytes <= 0 or self._kept_bytes <= MAX_KEPT_BYTES:
            return
        of_tenants = Counter[str]()
        for live in self._live:
            of_tenants[live.tenant] += live.kept_bytes
        [(tenant, _)] = of_tenants.most_common(1)
        max((live for live in self._live if live.tenant == tenant), key=lambda live: live.kept_bytes).drop()

    def _begin(
        self, builder: PooledRequestBuilder[Any], request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> "_LiveCall":
        self._metadata.fill(request, self._metadata.read(context))
        return _LiveCall(self._engine, self._telemetry, builder, request, context.time_remaining(), self.count)

    async def _run(self, live: "_LiveCall", deliver: Callable[[], Awaitable[Any]]) -> Any:
        self._live.add(live)
        try:
            return await live.run(deliver)
        finally:
            self._live.discard(live)


class _LiveCall:
    """The state of one live request."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        builder: PooledRequestBuilder[Any],
        message: Any,
        time_left_s: float | None,
        count: Callable[[int], None],
    ) -> None:
        """``count`` is called with the number of bytes of vectors that are kept from now on, or, if negative, no
        longer."""
        self._engine = engine
        self._telemetry = telemetry
        self._builder = builder
        self._message = message
        self._count = count
        self._principal = current_principal.get()
        self._request_id = current_request_id.get()
        self._cost = current_cost.get()
        self._arrival = time.monotonic()
        self._deadline = None if time_left_s is None else self._arrival + time_left_s
        self.tenant = self._principal.tenant
        self._span = NO_SPAN
        self._request: Request | None = None
        self._vectors: dict[int, bytes] = {}
        """What is needed of each vector. The rest is dropped on arrival, before all vectors are there."""
        self._num_in_order = 0
        """The number of first inputs whose vectors are there or sent."""
        self._wanted = 0
        """The number of first inputs whose vectors are waited for; 0 for the end."""
        self.kept_bytes = 0
        """The bytes of the vectors that are there and not sent."""
        self.is_dropped = False
        """Whether the call ends because too many are."""
        self._task = asyncio.current_task()
        self._finished: RequestFinished | None = None
        self._news = asyncio.Event()
        """Set at the end, and when the wanted vectors are there."""

    async def run(self, deliver: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what ``deliver`` returns, which is called when the request is in the engine. Raises ServiceError,
        Refused and StatusError."""
        failure: BaseException | None = None
        try:
            await self._enter()
            return await deliver()
        except asyncio.CancelledError as error:
            if self.is_dropped and self._task is not None and self._task.uncancel() == 0:
                failure = ServiceError(Reason.READER_TOO_SLOW, _TOO_SLOW)
                raise failure from None
            failure = error
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            self.abort(EngineFinishReason.CANCELLED)
            self._forget(list(self._vectors))
            self._report(failure)
            self._task = None
            self._request = None  # its sink refers to this call, and this call to the message
            del failure  # or this frame and its traceback would be a reference cycle

    def abort(self, reason: EngineFinishReason) -> None:
        if self._request is not None:
            self._engine.abort(self._request_id, reason)

    def drop(self) -> None:
        """Ends the call soon, even while its client reads nothing."""
        self.is_dropped = True
        self._forget(list(self._vectors))
        if self._task is not None:
            self._task.cancel()

    async def whole(self, respond: Callable[[Any, str, pb.Usage, Sequence[bytes]], Any]) -> Any:
        """Returns the response to all vectors."""
        await self._news.wait()
        usage = self._usage()
        vectors = [self._vectors[index] for index in sorted(self._vectors)]
        return await self._built(len(vectors), partial(respond, self._message, self._request_id, usage, vectors))

    async def send_all(self, builder: StreamedResponseBuilder[Any], send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends the vectors in order, in messages, while later ones are computed."""
        request, num_in_message = self._request, builder.num_in_message(self._message)
        assert request is not None
        for first in range(0, request.n, num_in_message):
            end = min(first + num_in_message, request.n)
            self._wanted = end if end < request.n else 0
            if self._num_in_order < end or not self._wanted:
                self._news.clear()
                if self._finished is None:
                    await self._news.wait()
            usage = None if self._finished is None else self._usage()
            indices = range(first, end)
            vectors = [self._vectors[index] for index in indices]
            of_end = usage if end == request.n else None
            num_vectors, arguments = len(vectors), (self._message, self._request_id, first, vectors, of_end)
            raw = await self._built(num_vectors, partial(_serialized, builder.message, *arguments))
            del vectors, arguments
            await send(raw)
            self._forget(indices)

    async def _enter(self) -> None:
        message, builder = self._message, self._builder
        self.tenant = self._principal.tenant_for(message.tenant)
        self._engine.charge(self.tenant, Rated.REQUEST)  # first: a refusal counts too
        builder.check(message)
        self._span = self._telemetry.request(self._request_id, self.tenant, builder.operation, message.traceparent)
        origin = Origin(self._request_id, self.tenant, self._arrival, self._deadline)
        async with preparation_limit(self._deadline, "the inputs were tokenized"):
            self._request = await builder.prepare(message, origin, self._on_event)
        self._engine.submit(self._request)

    def _usage(self) -> pb.Usage:
        """Returns the usage of a request that has ended. Raises StatusError if it failed."""
        finished = self._finished
        assert finished is not None
        status = ending_status(finished.reason, finished.message, self._request_id)
        if status.code:
            raise StatusError(status)
        return pb.Usage(prompt_tokens=finished.usage.prompt_tokens, cached_tokens=finished.usage.cached_tokens)

    async def _built(self, num_vectors: int, build: Callable[[], ResponseT]) -> ResponseT:
        if num_vectors * self._builder.work(self._message) <= _MAX_VALUES_ON_LOOP:
            return build()
        return await asyncio.to_thread(build)

    def _forget(self, indices: Sequence[int]) -> None:
        num_bytes = sum(len(self._vectors.pop(index)) for index in indices)
        self.kept_bytes -= num_bytes
        self._count(-num_bytes)

    def _on_event(self, event: Event) -> None:
        """The request's sink: never raises."""
        if isinstance(event, RequestAccepted):
            if self._span.is_recording:
                self._span.timeline = self._engine.explain(self._request_id)
        elif isinstance(event, Embedded) and not self.is_dropped:
            kept = self._vectors[event.choice] = self._builder.kept(self._message, event.vector)
            while self._num_in_order in self._vectors:
                self._num_in_order += 1
            if self._wanted and self._num_in_order >= self._wanted:
                self._news.set()
            self.kept_bytes += len(kept)
            self._count(len(kept))
        elif isinstance(event, RequestFinished):
            self._finished = event
            self._news.set()

    def _report(self, failure: BaseException | None) -> None:
        finished = self._finished
        if finished is None:  # the request never reached the engine
            is_cancelled = isinstance(failure, asyncio.CancelledError)
            reason = EngineFinishReason.CANCELLED if is_cancelled else EngineFinishReason.INTERNAL
            finished = unqueued_end(reason, self._request, self._arrival)
        else:
            self._cost.add_usage(finished.usage)
        end = End(
            request_id=self._request_id,
            client_request_id=self._message.client_request_id,
            tenant=self.tenant,
            operation=self._builder.operation,
            finished=finished,
            refusal=None if failure is None else from_exception(failure),
            code=grpc.StatusCode.OK if failure is None else code_of(failure),
            was_accepted=self._finished is not None,
        )
        report_end(self._span, self._telemetry.metrics, end)


def _serialized(make: Callable[..., Message], *arguments: Any) -> bytes:
    return make(*arguments).SerializeToString()
