"""GenerationService: many requests per stream, one request per stream, or one request with one response. All three use
the same code.

A stream has a reader, which starts and cancels requests, and a writer, which is the handler itself. When the handler
ends, for any reason, all live requests of its stream end too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from io import StringIO
from typing import Any

import grpc
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.clients.host.routing_headers import RoutingHeaders
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.request import EngineFinishReason, PromptLogprobsChunk, SequenceDelta
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import Validator
from penstock.service.errors import Reason, ServiceError, StatusError, ending_status, invalid, with_finished
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.requests.live.request_context import RequestContext
from penstock.service.requests.preparation import Origin
from penstock.service.rpc.frame_dispatcher import Frame, FrameDispatcher
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.rpc.load_report import current_cost
from penstock.service.rpc.routing_metadata import ROUTING_METADATA, RoutingMetadata
from penstock.service.rpc.single_call import SingleCall
from penstock.service.streaming.buffer_budget import BufferBudget, WritePacer
from penstock.service.streaming.messages import (
    SERVICE_STATES,
    fill_delta,
    fill_logprobs,
    single_messages,
    stream_messages,
)
from penstock.service.streaming.outbox import HEARTBEAT_S, Outbox
from penstock.service.streaming.parsed_delta import ParsedSequenceDelta
from penstock.service.streaming.pending_message import OutputForm, PendingMessage
from penstock.service.transport.request_id import new_request_id
from penstock.v1 import generation_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(pb_grpc.GenerationServiceServicer):
    """The servicer, and the register of live requests."""

    def __init__(
        self,
        request_context: RequestContext,
        validator: Validator,
        heartbeat_s: float = HEARTBEAT_S,
        metadata: RoutingMetadata = ROUTING_METADATA,
    ) -> None:
        self._request_context = request_context
        self._metadata = metadata
        self._validator = validator
        self._heartbeat_s = heartbeat_s
        self._pacer = WritePacer()
        self._buffer_budget = BufferBudget()
        self._live: set[RequestLifecycle] = set()
        """The live requests of all kinds of calls."""
        self._outboxes: set[Outbox] = set()
        """The outboxes of the multiplexed streams."""

    @property
    def num_live(self) -> int:
        """The number of requests that have started and not ended, including those in preparation."""
        return len(self._live)

    # The generated base class knows only handlers that yield; gRPC also accepts handlers that write.
    async def Generate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GenerateRequest], context: Context
    ) -> None:
        """Serves many requests, until the client half-closes and the last request has ended."""
        await self.serve_stream(request_iterator, context, stream_messages)

    async def serve_stream(
        self,
        frames: AsyncIterator[Frame],
        context: Context,
        encode: Callable[[PendingMessage], Sequence[Message]],
        mode_of: Callable[[pb.GenerationStart], ResponseMode] = lambda start: ResponseMode.STREAMED,
    ) -> None:
        """Serves the requests of a multiplexed stream, until the frames and the last request have ended. ``encode``
        builds its messages. ``mode_of``: whether the output of a request is sent as it arrives."""
        headers = self._metadata.read(context)

        def new_request(
            start: pb.GenerationStart, receiver: Outbox, on_end: Callable[[RequestLifecycle], None]
        ) -> RequestLifecycle:
            return self.new_request(start, receiver, on_end, answer=mode_of(start), headers=headers)

        await context.send_initial_metadata(())
        outbox = self.new_outbox(context.write, encode, lambda held: stream.hold(held))  # noqa: PLW0108
        stream = FrameDispatcher(new_request, outbox, self._validator)
        self._outboxes.add(outbox)
        outbox.begin_beats()
        reader = asyncio.create_task(stream.read(frames))
        reader.add_done_callback(stream.on_read)
        try:
            await outbox.run()
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            stream.drop()

    async def GenerateOne(self, request: pb.GenerateOneRequest, context: Context) -> None:  # type: ignore[override]
        """Serves one request. A refusal is only the call's status, with no message before it, so proxies may retry."""
        start = _required(request)
        await SingleCall(self, start, context, single_messages, beats=True).run(start)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        answer = _WholeAnswer()
        start = _required(request)
        live = self.new_request(start, answer, lambda live: None, context, ResponseMode.WHOLE)
        live.begin_request(start)
        try:
            response = await answer.whole
        finally:
            live.cancel()
        if not live.status.code:
            return response
        # The status must contain the usage, which is billed: there is no other message for it.
        raise StatusError(with_finished(live.status, response.finished) if live.was_accepted else live.status)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        start = _required(request)
        self._metadata.fill(start, self._metadata.read(context))
        tenant, warm_up = self._charged_tenant(start.tenant), self._request_context.open_prompts.warm_up
        self._validator.check(request)
        time_left_s, arrival = context.time_remaining(), time.monotonic()
        deadline = None if time_left_s is None else arrival + time_left_s
        origin = Origin(current_request_id.get(), tenant, arrival, deadline)
        prepared, _ = await warm_up.prepare(lambda: start, start.ByteSize(), start.continue_from, origin)
        retain_s = start.retain_ms / 1000 if start.HasField("retain_ms") else self._request_context.open_prompts.ttl_s
        retain_s = min(retain_s, self._request_context.conversations.ttl_s)
        finished = await warm_up.run(prepared, warm_up.new_paid_prefix(), retain_s)
        current_cost.get().add_usage(finished.usage)
        status = ending_status(finished.reason, finished.message, prepared.request_id)
        if status.code:
            raise StatusError(status)
        return pb.PrefetchResponse(
            prompt_tokens=finished.usage.prompt_tokens, cached_tokens=finished.usage.cached_tokens
        )

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self._metadata.fill(request, self._metadata.read(context))
        tenant = self._charged_tenant(request.tenant)  # first: a refusal counts too
        self._validator.check(request)
        unknown: list[str] = []
        for request_id in request.request_ids:
            hashes = self._request_context.conversations.release(request_id, tenant)
            if hashes is None:
                unknown.append(request_id)
            else:
                self._request_context.engine.release(hashes, tenant)
            await asyncio.sleep(0)  # a tenant may have many contexts to compare
        return pb.ReleaseResponse(unknown_request_ids=unknown)

    def _charged_tenant(self, named: str) -> str:
        tenant = current_principal.get().tenant_for(named)
        self._request_context.engine.charge(tenant, Rated.REQUEST)
        return tenant

    def new_request(
        self,
        start: pb.GenerationStart,
        receiver: "Outbox | _WholeAnswer",
        on_end: Callable[[RequestLifecycle], None],
        call: Context | None = None,
        answer: ResponseMode = ResponseMode.STREAMED,
        headers: RoutingHeaders | None = None,
    ) -> RequestLifecycle:
        """Creates a request of the current caller and registers it until it ends. ``call`` is its single-request call,
        if any, whose id, deadline and metadata it takes; otherwise ``headers`` are those of its stream. Raises
        ServiceError."""
        self._metadata.fill(start, self._metadata.read(call) if headers is None else headers)
        cost = current_cost.get()

        def unregister(live: RequestLifecycle) -> None:
            self._live.discard(live)
            if live.finished is not None and live.was_accepted:
                cost.add_usage(live.finished.usage)
            on_end(live)

        live = RequestLifecycle(
            self._request_context,
            start,
            request_id=new_request_id() if call is None else current_request_id.get(),
            principal=current_principal.get(),
            receiver=receiver,
            on_end=unregister,
            answer=answer,
            time_left_s=None if call is None else call.time_remaining(),
        )
        self._live.add(live)
        return live

    def send_state(self) -> None:
        """Sends a heartbeat on every multiplexed stream, because the service's state has changed."""
        for outbox in self._outboxes:
            outbox.heartbeat()

    def drain(self) -> None:
        """Ends the requests whose prompts are open, because the engine refuses new requests."""
        for live in list(self._live):
            live.drain()

    def shut_down(self) -> None:
        """Ends every request. Ends every unfinished multiplexed stream with UNAVAILABLE, after its pending messages."""
        unfinished = [outbox for outbox in self._outboxes if not outbox.is_closed]
        for live in list(self._live):
            live.cancel(EngineFinishReason.SHUTDOWN)
        for outbox in unfinished:
            outbox.close(ServiceError(Reason.DRAINING))

    def new_outbox(self, write: Any, encode: Any, on_stall: Callable[[bool], None]) -> Outbox:
        """Creates an outbox, within the limits of all streams together."""
        return Outbox(write, encode, self._pacer, self._buffer_budget, self._state, on_stall, self._heartbeat_s)

    def _state(self) -> "pb.ServiceState.ValueType":
        return SERVICE_STATES[self._request_context.engine.state]


class _WholeAnswer:
    """Collects a request's output into one response."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[pb.CompleteResponse] = asyncio.get_running_loop().create_future()
        self._response = pb.CompleteResponse()
        """Filled as output arrives: filling all of it at the end would block the event loop."""
        self._texts: list[StringIO] = []
        """The text of each choice. A string in a message would be copied with each delta."""
        self._parsed: dict[int, _ParsedTexts] = {}
        """The same for reasoning and calls, if there are any."""

    def accepted(self, accepted: pb.Accepted) -> None:
        """Does nothing: the end contains all of it."""

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk, form: OutputForm) -> None:
        """Appends ``part``. Parts arrive in order and without gaps."""
        whole = self._response.prompt_logprobs
        if not self._response.HasField("prompt_logprobs"):
            whole.ref = ref
            whole.start = part.start
        fill_logprobs(whole.logprobs, part.logprobs, part.token_ids, form)

    def delta(self, ref: int, delta: SequenceDelta, form: OutputForm, at_once: bool) -> None:
        while len(self._texts) <= delta.choice:
            self._response.choices.add(index=len(self._texts))
            self._texts.append(StringIO())
        if form.text:
            self._texts[delta.choice].write(delta.text)
        if isinstance(delta, ParsedSequenceDelta):
            self._parsed.setdefault(delta.choice, _ParsedTexts()).add_delta(delta)
        choice = self._response.choices[delta.choice]
        fill_delta(choice, form._replace(text=False), [delta])
        if form.text and delta.logprobs is not None and delta.text_lengths is not None:
            choice.logprobs.text_lengths.extend(delta.text_lengths)

    def injected(self, injected: pb.Injected) -> None:
        """Never called: nothing can be appended to the request of a single call."""

    def finished(self, finished: pb.Finished) -> None:
        self._response.request_id = finished.request_id
        self._response.finished.CopyFrom(finished)
        for choice, text in zip(self._response.choices, self._texts, strict=True):
            choice.text = text.getvalue()
        for index, parsed in self._parsed.items():
            parsed.fill_choice(self._response.choices[index])
        if not self.whole.done():
            self.whole.set_result(self._response)

    def fail(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


class _ParsedTexts:
    """The reasoning and the calls of one choice."""

    def __init__(self) -> None:
        self._reasoning = StringIO()
        self._calls: list[tuple[pb.OutputToolCall, StringIO]] = []
        """Each call, and its arguments so far."""

    def add_delta(self, delta: ParsedSequenceDelta) -> None:
        self._reasoning.write(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self._calls):
                begun = pb.OutputToolCall(id=call.id, name=call.name, text_offset=call.at)
                self._calls.append((begun, StringIO()))
            whole, arguments = self._calls[call.index]
            whole.is_incomplete = call.breaks_off
            arguments.write(call.arguments)

    def fill_choice(self, choice: pb.Choice) -> None:
        choice.reasoning = self._reasoning.getvalue()
        for call, arguments in self._calls:
            call.arguments_json = arguments.getvalue()
            choice.tool_calls.append(call)


def _required(request: pb.GenerateOneRequest | pb.CompleteRequest | pb.PrefetchRequest) -> pb.GenerationStart:
    if not request.HasField("start"):
        raise invalid("start", "is required")
    if request.start.open:
        raise invalid("start.open", "only on a Generate stream; omit it, or send all of the prompt here")
    if isinstance(request, pb.CompleteRequest) and request.start.HasField("resume_from"):
        message = "Complete returns the whole output; resume with GenerateOne, or omit resume_from"
        raise ServiceError(Reason.NOT_RESUMABLE, message, field="start.resume_from")
    if request.start.supersedes:
        raise invalid("start.supersedes", "only on a Generate stream, for a request of the same stream; omit it")
    return request.start
