"""Unary calls that need one vector for each input: embeddings, classes and scores. Each is one request. The call's own
task does all steps: it checks, prepares and queues the request, and removes it from the engine however the call ends.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import Embedded, EngineFinishReason, Event, Request, RequestAccepted, RequestFinished
from penstock.service.auth.identity import current_principal
from penstock.service.errors import StatusError, code_of, ending_status, from_exception
from penstock.service.requests.generate import Origin
from penstock.service.requests.preparation import preparation_limit, unqueued_end
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import NO_SPAN, Telemetry

_MAX_VALUES_ON_LOOP = 8192
"""Responses that take more work are built in a thread."""

RequestT = TypeVar("RequestT", bound=Any)
ResponseT = TypeVar("ResponseT")
RequestT_contra = TypeVar("RequestT_contra", bound=Any, contravariant=True)
ResponseT_co = TypeVar("ResponseT_co", covariant=True)


class PooledRequestBuilder(Protocol[RequestT_contra, ResponseT_co]):
    """What differs between the methods."""

    operation: str
    """The name of the operation in metrics and traces."""

    def check(self, request: RequestT_contra) -> None:
        """Makes all checks that are possible before the inputs are tokenized. Raises ServiceError."""

    async def prepare(self, request: RequestT_contra, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""

    def kept(self, request: RequestT_contra, vector: bytes) -> bytes:
        """Returns what ``response`` needs of a vector. Fast, since it runs on the event loop."""

    def work(self, request: RequestT_contra) -> int:
        """Returns the work of ``response`` for each input, in values that it reads."""

    def response(
        self, request: RequestT_contra, request_id: str, usage: pb.Usage, vectors: Sequence[bytes]
    ) -> ResponseT_co:
        """Returns the response for what ``kept`` returned, in the order of the inputs."""


class PooledCalls:
    """Serves the calls, and knows those that are live."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._live: set[_LiveCall] = set()

    @property
    def num_live(self) -> int:
        """The number of requests that have started and not ended, including those in preparation."""
        return len(self._live)

    async def serve(
        self,
        builder: PooledRequestBuilder[RequestT, ResponseT],
        request: RequestT,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> ResponseT:
        """Returns the response of one call. Raises ServiceError, Refused and StatusError."""
        live = _LiveCall(self._engine, self._telemetry, builder, request, context.time_remaining())
        self._live.add(live)
        try:
            response: ResponseT = await live.answer()
            return response
        finally:
            self._live.discard(live)

    def shut_down(self) -> None:
        """Ends every queued or running request. The engine refuses those that are still in preparation."""
        for live in list(self._live):
            live.abort(EngineFinishReason.SHUTDOWN)


class _LiveCall:
    """The state of one live request."""

    def __init__(
        self,
        engine: Engine,
        telemetry: Telemetry,
        builder: PooledRequestBuilder[Any, Any],
        message: Any,
        time_left_s: float | None,
    ) -> None:
        self._engine = engine
        self._telemetry = telemetry
        self._builder = builder
        self._message = message
        self._principal = current_principal.get()
        self._request_id = current_request_id.get()
        self._arrival = time.monotonic()
        self._deadline = None if time_left_s is None else self._arrival + time_left_s
        self._tenant = self._principal.tenant
        self._span = NO_SPAN
        self._request: Request | None = None
        self._vectors: dict[int, bytes] = {}
        """What is needed of each vector. The rest is dropped on arrival, before all vectors are there."""
        self._finished: RequestFinished | None = None
        self._end = asyncio.Event()

    async def answer(self) -> Any:
        """Returns the response. Raises ServiceError, Refused and StatusError."""
        failure: BaseException | None = None
        try:
            return await self._answer()
        except BaseException as error:
            failure = error
            raise
        finally:
            self.abort(EngineFinishReason.CANCELLED)
            self._report(failure)
            self._request = None  # its sink refers to this call, and this call to the message
            del failure  # or this frame and its traceback would be a reference cycle

    def abort(self, reason: EngineFinishReason) -> None:
        if self._request is not None:
            self._engine.abort(self._request_id, reason)

    async def _answer(self) -> Any:
        message, builder = self._message, self._builder
        self._tenant = self._principal.tenant_for(message.tenant)
        self._engine.charge(self._tenant, Rated.REQUEST)  # first: a refusal counts too
        builder.check(message)
        self._span = self._telemetry.request(self._request_id, self._tenant, builder.operation, message.traceparent)
        origin = Origin(self._request_id, self._tenant, self._arrival, self._deadline)
        async with preparation_limit(self._deadline, "the inputs were tokenized"):
            self._request = await builder.prepare(message, origin, self._on_event)
        self._engine.submit(self._request)
        await self._end.wait()
        finished = self._finished
        assert finished is not None
        status = ending_status(finished.reason, finished.message, self._request_id)
        if status.code:
            raise StatusError(status)
        usage = pb.Usage(prompt_tokens=finished.usage.prompt_tokens, cached_tokens=finished.usage.cached_tokens)
        vectors = [self._vectors[index] for index in range(self._request.n)]
        if len(vectors) * builder.work(message) <= _MAX_VALUES_ON_LOOP:
            return builder.response(message, self._request_id, usage, vectors)
        return await asyncio.to_thread(builder.response, message, self._request_id, usage, vectors)

    def _on_event(self, event: Event) -> None:
        """The request's sink: never raises."""
        if isinstance(event, RequestAccepted):
            if self._span.is_recording:
                self._span.timeline = self._engine.explain(self._request_id)
        elif isinstance(event, Embedded):
            self._vectors[event.choice] = self._builder.kept(self._message, event.vector)
        elif isinstance(event, RequestFinished):
            self._finished = event
            self._end.set()

    def _report(self, failure: BaseException | None) -> None:
        finished = self._finished
        if finished is None:  # the request never reached the engine
            is_cancelled = isinstance(failure, asyncio.CancelledError)
            reason = EngineFinishReason.CANCELLED if is_cancelled else EngineFinishReason.INTERNAL
            finished = unqueued_end(reason, self._request, self._arrival)
        end = End(
            request_id=self._request_id,
            client_request_id=self._message.client_request_id,
            tenant=self._tenant,
            operation=self._builder.operation,
            finished=finished,
            refusal=None if failure is None else from_exception(failure),
            code=grpc.StatusCode.OK if failure is None else code_of(failure),
            was_accepted=self._finished is not None,
        )
        report_end(self._span, self._telemetry.metrics, end)
