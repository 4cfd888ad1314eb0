"""EmbeddingService: one request per call, one response. The call's own task does all steps: it checks, prepares and
queues the request, and removes it from the engine however the call ends."""

import asyncio
import time
from typing import Any

import grpc

from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import Embedded, EngineFinishReason, Event, Request, RequestAccepted, RequestFinished
from penstock.service.auth.identity import Principal, current_principal
from penstock.service.errors import StatusError, code_of, ending_status, from_exception
from penstock.service.requests.embed import EmbedRequestBuilder
from penstock.service.requests.generate import Origin
from penstock.service.requests.lifecycle import preparation_limit, unqueued_end
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import NO_SPAN, Telemetry
from penstock.v1 import embedding_pb2 as pb, embedding_pb2_grpc as pb_grpc, generation_pb2

_OPERATION = "embeddings"
_MAX_VALUES_ON_LOOP = 8192
"""Larger responses are built in a thread."""


class EmbeddingService(pb_grpc.EmbeddingServiceServicer):
    """The servicer, and the register of live requests."""

    def __init__(self, engine: Engine, request_builder: EmbedRequestBuilder, telemetry: Telemetry) -> None:
        self._engine = engine
        self._request_builder = request_builder
        self._telemetry = telemetry
        self._live: set[_LiveEmbedding] = set()

    @property
    def num_live(self) -> int:
        """The number of requests that have started and not ended, including those in preparation."""
        return len(self._live)

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.EmbedResponse:
        live = _LiveEmbedding(self._engine, self._request_builder, current_principal.get(), context.time_remaining())
        self._live.add(live)
        try:
            return await live.answer(request, self._telemetry)
        finally:
            self._live.discard(live)

    def shut_down(self) -> None:
        """Ends every queued or running request. The engine refuses those that are still in preparation."""
        for live in list(self._live):
            live.abort(EngineFinishReason.SHUTDOWN)


class _LiveEmbedding:
    """The state of one live request."""

    def __init__(
        self, engine: Engine, request_builder: EmbedRequestBuilder, principal: Principal, time_left_s: float | None
    ) -> None:
        self._engine = engine
        self._request_builder = request_builder
        self._principal = principal
        self._request_id = current_request_id.get()
        self._arrival = time.monotonic()
        self._deadline = None if time_left_s is None else self._arrival + time_left_s
        self._tenant = principal.tenant
        self._span = NO_SPAN
        self._request: Request | None = None
        self._vectors: dict[int, bytes] = {}
        self._vector_bytes = 0
        """The requested size of each vector. The rest is dropped on arrival, before all vectors are there."""
        self._finished: RequestFinished | None = None
        self._end = asyncio.Event()

    async def answer(self, request: pb.EmbedRequest, telemetry: Telemetry) -> pb.EmbedResponse:
        """Returns the vectors of all inputs. Raises ServiceError, Refused and StatusError."""
        failure: BaseException | None = None
        try:
            return await self._answer(request, telemetry)
        except BaseException as error:
            failure = error
            raise
        finally:
            self.abort(EngineFinishReason.CANCELLED)
            self._report(failure, request.client_request_id, telemetry)
            del failure  # or this frame and its traceback would be a reference cycle

    def abort(self, reason: EngineFinishReason) -> None:
        if self._request is not None:
            self._engine.abort(self._request_id, reason)

    async def _answer(self, request: pb.EmbedRequest, telemetry: Telemetry) -> pb.EmbedResponse:
        self._tenant = self._principal.tenant_for(request.tenant)
        self._engine.charge(self._tenant, Rated.REQUEST)  # first: a refusal counts too
        self._request_builder.check(request)
        self._span = telemetry.request(self._request_id, self._tenant, _OPERATION, request.traceparent)
        self._vector_bytes = self._request_builder.vector_bytes(request)
        origin = Origin(self._request_id, self._tenant, self._arrival, self._deadline)
        async with preparation_limit(self._deadline, "the inputs were tokenized"):
            self._request = await self._request_builder.prepare(request, origin, self._on_event)
        self._engine.submit(self._request)
        await self._end.wait()
        finished = self._finished
        assert finished is not None
        status = ending_status(finished.reason, finished.message, self._request_id)
        if status.code:
            raise StatusError(status)
        usage = generation_pb2.Usage(
            prompt_tokens=finished.usage.prompt_tokens, cached_tokens=finished.usage.cached_tokens
        )
        response = pb.EmbedResponse(request_id=self._request_id, usage=usage)
        vectors = [self._vectors[index] for index in range(len(request.inputs))]
        if len(vectors) * self._request_builder.dimensions(request) <= _MAX_VALUES_ON_LOOP:
            self._request_builder.fill(response, vectors, request)
        else:
            await asyncio.to_thread(self._request_builder.fill, response, vectors, request)
        return response

    def _on_event(self, event: Event) -> None:
        """The request's sink: never raises."""
        if isinstance(event, RequestAccepted):
            if self._span.is_recording:
                self._span.timeline = self._engine.explain(self._request_id)
        elif isinstance(event, Embedded):
            self._vectors[event.choice] = event.vector[: self._vector_bytes]
        elif isinstance(event, RequestFinished):
            self._finished = event
            self._end.set()

    def _report(self, failure: BaseException | None, client_request_id: str, telemetry: Telemetry) -> None:
        finished = self._finished
        if finished is None:  # the request never reached the engine
            is_cancelled = isinstance(failure, asyncio.CancelledError)
            reason = EngineFinishReason.CANCELLED if is_cancelled else EngineFinishReason.INTERNAL
            finished = unqueued_end(reason, self._request, self._arrival)
        end = End(
            request_id=self._request_id,
            client_request_id=client_request_id,
            tenant=self._tenant,
            operation=_OPERATION,
            finished=finished,
            refusal=None if failure is None else from_exception(failure),
            code=grpc.StatusCode.OK if failure is None else code_of(failure),
            was_accepted=self._finished is not None,
        )
        report_end(self._span, telemetry.metrics, end)
