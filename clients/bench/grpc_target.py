"""``penstock bench --api grpc``: calls a service by ``Generate`` streams, or by one ``GenerateOne`` per request."""

import asyncio
import time
from collections.abc import Sequence
from typing import Self

import grpc

import penstock.v1 as pb
from penstock.clients.bench.target import OK, Record, context
from penstock.clients.bench.workload import BenchRequest
from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.errors import InvalidOption, RequestFailed, failure_from_call
from penstock.clients.events import Accepted, Delta, Event, Finished
from penstock.clients.requests import build_start
from penstock.clients.stream import GenerateStream
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

_GRACE_SECONDS = 5.0
"""How long after a request's deadline the client gives up. The service enforces the deadline itself."""


class GrpcCaller:
    """Calls one service over one connection. Use it from one event loop, for one or several concurrent loads.

    Distributes requests over ``num_streams`` Generate streams in turn, like a gateway; with None, each request is a
    separate call. Later turns of a conversation continue the previous turn, or with ``resend_context`` send the whole
    conversation.
    """

    def __init__(
        self,
        service: ConnectionOptions,
        *,
        num_streams: int | None = 1,
        timeout_s: float | None = None,
        resend_context: bool = False,
    ) -> None:
        self._service = service
        self._metadata = call_metadata(service.api_key)
        self._channel = open_channel(service.target, service.tls)
        self._stub = GenerationServiceStub(self._channel)
        self._streams: list[GenerateStream | None] = [None] * (num_streams or 0)
        self._next_stream = 0
        self._timeout_s = timeout_s
        self._resend_context = resend_context

    async def __aenter__(self) -> Self:
        """Connects, so that the first requests do not wait for the connection. If that fails, each request reports
        it."""
        state = self._channel.get_state(try_to_connect=True)
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        """Sends a request and records its events. Raises InvalidOption for a request that cannot be sent."""
        start = self._start(request, past)
        receiver = _Receiver(record)
        send = self._alone if not self._streams else self._carried
        try:
            async with asyncio.timeout(None if self._timeout_s is None else self._timeout_s + _GRACE_SECONDS):
                await send(start, receiver)
        except TimeoutError:
            record.fail(time.perf_counter(), "DEADLINE_EXCEEDED", "the deadline passed without a response")

    async def close(self) -> None:
        """Cancels running requests and closes the connection."""
        await asyncio.gather(*(stream.close() for stream in self._streams if stream is not None))
        await self._channel.close()

    def _start(self, request: BenchRequest, past: Sequence[Record]) -> pb.GenerationStart:
        prompt = request.prompt_token_ids
        options = {**request.options, "max_tokens": request.max_tokens}
        if past and past[-1].may_continue and not self._resend_context:
            options["continue_from"] = past[-1].request_id
        else:
            prompt = context(request, past)
        start = build_start(prompt, options, self._timeout_s)
        if start.output.format == pb.OUTPUT_FORMAT_TEXT:
            raise InvalidOption("format", "expected token_ids or text_and_token_ids, since tokens are counted")
        return start

    async def _carried(self, start: pb.GenerationStart, receiver: "_Receiver") -> None:
        stream = self._stream()
        ref = stream.carry(start, receiver)
        try:
            await receiver.ended
        except asyncio.CancelledError:
            stream.cancel(ref)
            raise

    def _stream(self) -> GenerateStream:
        """Returns the next stream in turn, replaced by a new one if it has broken."""
        self._next_stream = place = (self._next_stream + 1) % len(self._streams)
        stream = self._streams[place]
        if stream is None or not stream.is_open:
            stream = GenerateStream(lambda: self._stub.Generate(metadata=self._metadata), self._service.target)
            self._streams[place] = stream
        return stream

    async def _alone(self, start: pb.GenerationStart, receiver: "_Receiver") -> None:
        call = self._stub.GenerateOne(pb.GenerateOneRequest(start=start), metadata=self._metadata)
        finished: Finished | None = None
        try:
            async for response in call:
                if response.HasField("accepted"):
                    receiver.put(Accepted.from_proto(response.accepted))
                for delta in response.deltas:
                    receiver.put(Delta.from_proto(delta))
                if response.HasField("finished"):
                    finished = Finished.from_proto(response.finished)
        except grpc.aio.AioRpcError as error:
            failure = failure_from_call(error, self._service.target)
            failure.finished = finished
            receiver.fail(failure)
        else:
            if finished is None:
                receiver.fail(RequestFailed(grpc.StatusCode.UNAVAILABLE, "the service ended the stream"))
            else:
                receiver.put(finished)


class _Receiver:
    """Records events as soon as the stream's reader has them: no task must be woken for a token."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, event: Event) -> None:
        if self.ended.done():
            return  # given up; its record is closed
        match event:
            case Delta():
                if event.token_ids:
                    self._record.tokens(time.perf_counter(), event.token_ids, len(event.token_ids))
            case Accepted():
                self._record.request_id = event.request_id
                self._record.prompt_tokens = event.prompt_tokens
                if event.predicted_ttft_ms is not None:
                    self._record.predicted_ttft_s = event.predicted_ttft_ms / 1000
            case Finished():
                self._note_end(event)
                self._record.status = OK
                self.ended.set_result(None)

    def fail(self, failure: RequestFailed) -> None:
        if self.ended.done():
            return
        if failure.finished is not None:
            self._note_end(failure.finished)
        self._record.retry_after_s = failure.retry_after
        self._record.request_id = self._record.request_id or failure.request_id
        self._record.fail(time.perf_counter(), failure.code.name, failure.message, failure.reason)
        self.ended.set_result(None)

    def _note_end(self, finished: Finished) -> None:
        record = self._record
        record.ended_s = time.perf_counter()
        record.request_id = finished.request_id
        record.finish_reason = finished.reason.value
        record.may_continue = finished.may_continue
        record.prompt_tokens = finished.usage.prompt_tokens
        record.cached_tokens = finished.usage.cached_tokens
        record.output_tokens = finished.usage.output_tokens
        if (speculation := finished.speculation) is not None:
            record.drafts = speculation.steps
            record.drafted_tokens, record.accepted_tokens = speculation.drafted_tokens, speculation.accepted_tokens
