"""GenerationService: many requests per stream, one request per stream, or one request with one response. All three use
the same code.

A stream has a reader, which starts and cancels requests, and a writer, which is the handler itself. When the handler
ends, for any reason, all live requests of its stream end too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from io import StringIO
from typing import Any

import grpc

import penstock.v1 as pb
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.request import EngineFinishReason, PromptLogprobsChunk, SequenceDelta
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import Validator
from penstock.service.errors import Reason, ServiceError, StatusError, invalid, to_status, with_finished
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.lifecycle import RequestContext, RequestLifecycle
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.streaming.buffer_budget import BufferBudget, WritePacer
from penstock.service.streaming.messages import fill_delta, fill_logprobs, single_message, stream_message
from penstock.service.streaming.outbox import HEARTBEAT_S, Outbox
from penstock.service.streaming.parsed_delta import ParsedSequenceDelta
from penstock.service.streaming.pending_message import OutputForm
from penstock.service.transport.request_id import new_request_id
from penstock.v1 import generation_pb2_grpc as pb_grpc

_STATES: Mapping[EngineState, "pb.ServiceState.ValueType"] = {
    EngineState.STARTING: pb.SERVICE_STATE_RECOVERING,
    EngineState.SERVING: pb.SERVICE_STATE_SERVING,
    EngineState.RECOVERING: pb.SERVICE_STATE_RECOVERING,
    EngineState.DRAINING: pb.SERVICE_STATE_DRAINING,
    EngineState.FAILED: pb.SERVICE_STATE_DRAINING,
    EngineState.STOPPED: pb.SERVICE_STATE_DRAINING,
}

MAX_REFUSED_IN_A_ROW = 64
REFUSED_PAUSE_S = 0.005
"""The pause before each further frame, until a request is accepted. Without it, a client that keeps sending requests
that are refused could take all of the event loop's time. No frame is lost, and running requests continue."""

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(pb_grpc.GenerationServiceServicer):
    """The servicer, and the register of live requests."""

    def __init__(self, request_context: RequestContext, validator: Validator, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._request_context = request_context
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
        await context.send_initial_metadata(())
        outbox = self._new_outbox(context.write, stream_message, lambda held: stream.hold(held))  # noqa: PLW0108
        stream = _Stream(self, outbox, self._validator)
        self._outboxes.add(outbox)
        outbox.begin_beats()
        reader = asyncio.create_task(stream.read(request_iterator))
        reader.add_done_callback(stream.on_read)
        try:
            await outbox.run()
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            stream.drop()

    async def GenerateOne(self, request: pb.GenerateOneRequest, context: Context) -> None:  # type: ignore[override]
        """Serves one request. A refusal is only the call's status, with no message before it, so proxies may retry."""
        has_begun = False

        async def write(raw: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                # Sent separately: in one operation with a message that is held up, no status could overtake it.
                has_begun = True
                outbox.begin_beats()  # not before: a heartbeat would prevent proxies from retrying elsewhere
                await context.send_initial_metadata(())
            await context.write(raw)

        outbox = self._new_outbox(write, single_message, lambda held: live.hold(held))  # noqa: PLW0108

        def on_end(live: RequestLifecycle) -> None:
            error = StatusError(live.status) if live.status.code else None
            if error is not None and not live.was_accepted:
                outbox.fail(error)
            else:
                outbox.close(error)

        start = _required(request)
        live = self.new_request(start, outbox, on_end, context)
        outbox.opened()
        live.begin_request(start)
        try:
            await outbox.run()
        finally:
            live.cancel()

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

    def new_request(
        self,
        start: pb.GenerationStart,
        receiver: "Outbox | _WholeAnswer",
        on_end: Callable[[RequestLifecycle], None],
        call: Context | None = None,
        answer: ResponseMode = ResponseMode.STREAMED,
    ) -> RequestLifecycle:
        """Creates a request of the current caller and registers it until it ends. ``call`` is its single-request call,
        if any, whose id and deadline it takes."""

        def unregister(live: RequestLifecycle) -> None:
            self._live.discard(live)
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

    def shut_down(self) -> None:
        """Ends every request. Ends every unfinished multiplexed stream with UNAVAILABLE, after its pending messages."""
        unfinished = [outbox for outbox in self._outboxes if not outbox.is_closed]
        for live in list(self._live):
            live.cancel(EngineFinishReason.SHUTDOWN)
        for outbox in unfinished:
            outbox.close(ServiceError(Reason.DRAINING))

    def _new_outbox(self, write: Any, encode: Any, on_stall: Callable[[bool], None]) -> Outbox:
        return Outbox(write, encode, self._pacer, self._buffer_budget, self._state, on_stall, self._heartbeat_s)

    def _state(self) -> "pb.ServiceState.ValueType":
        return _STATES[self._request_context.engine.state]


class _Stream:
    """The requests of one multiplexed stream."""

    def __init__(self, service: GenerationService, outbox: Outbox, validator: Validator) -> None:
        self._service = service
        self._outbox = outbox
        self._validator = validator
        self._live: dict[int, RequestLifecycle] = {}
        self._last: asyncio.Task[None] | None = None
        self._half_closed = False
        self._num_refused = 0
        """Consecutive requests refused before preparation. A refusal by a full queue, which is not the client's fault,
        does not count."""

    async def read(self, frames: AsyncIterator[pb.GenerateRequest]) -> None:
        """Handles frames until the client half-closes. Raises ServiceError for one that breaks the stream's rules."""
        async for frame in frames:
            num_refused = self._num_refused
            self._take(frame)
            del frame  # it may be megabytes, and the next one may not arrive for hours
            if self._num_refused > max(num_refused, MAX_REFUSED_IN_A_ROW):
                await asyncio.sleep(REFUSED_PAUSE_S)

    def on_read(self, reader: asyncio.Task[None]) -> None:
        """Handles the reader's end: no more frames will arrive."""
        if reader.cancelled():
            # At the handler's end this no longer matters; at any other time it is an internal error.
            self._outbox.fail(RuntimeError("the reader of a stream was cancelled"))
        elif (error := reader.exception()) is not None:
            self._outbox.fail(error if isinstance(error, Exception) else RuntimeError("the reader of a stream died"))
        self._half_closed = True
        self._close_if_done()

    def hold(self, held: bool) -> None:
        """Pauses the stream's requests, so that they take no part in steps, or resumes them. ``held``: whether the
        client has stopped reading."""
        for live in list(self._live.values()):
            live.hold(held)

    def drop(self) -> None:
        for live in list(self._live.values()):
            live.cancel()

    def _take(self, frame: pb.GenerateRequest) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "start":
            self._start(frame.start)
        elif kind == "cancel":
            self._validator.check(frame.cancel)
            for ref in frame.cancel.refs:
                live = self._live.get(ref)
                if live is not None:
                    live.cancel()
        elif kind == "update":
            self._update(frame.update)
        else:
            raise invalid("frame", "is required; set start, cancel or update")

    def _start(self, start: pb.GenerationStart) -> None:
        if start.ref in self._live:
            raise ServiceError(
                Reason.DUPLICATE_REF,
                f"start.ref: {start.ref} is live on this stream; choose another",
                field="start.ref",
            )
        live = self._service.new_request(start, self._outbox, self._on_end)
        self._live[start.ref] = live
        self._outbox.opened()
        live.hold(self._outbox.is_stalled)
        live.begin_request(start, after=self._last)
        self._num_refused = 0 if live.preparation is not None else self._num_refused + 1
        self._last = live.preparation or self._last

    def _update(self, update: pb.GenerationUpdate) -> None:
        live = self._live.get(update.ref)
        if live is None:
            return

        def refuse(error: ServiceError) -> None:
            status = to_status(error, live.request_id)
            self._outbox.update_refused(pb.UpdateRefused(ref=live.ref, status=status))

        try:
            self._validator.check(update)
        except ServiceError as error:
            self._num_refused += 1
            refuse(error)
        else:
            live.update(update, refuse)

    def _on_end(self, live: RequestLifecycle) -> None:
        del self._live[live.ref]
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._half_closed and not self._live:
            self._outbox.close()


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

    def prompt_logprobs(self, ref: int, part: PromptLogprobsChunk) -> None:
        """Appends ``part``. Parts arrive in order and without gaps."""
        whole = self._response.prompt_logprobs
        if not self._response.HasField("prompt_logprobs"):
            whole.ref = ref
            whole.start = part.start
        fill_logprobs(whole.logprobs, part.logprobs)

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
        self._calls: list[tuple[pb.ToolCall, StringIO]] = []
        """Each call, and its arguments so far."""

    def add_delta(self, delta: ParsedSequenceDelta) -> None:
        self._reasoning.write(delta.reasoning)
        for call in delta.calls:
            if call.index == len(self._calls):
                self._calls.append((pb.ToolCall(id=call.id, name=call.name), StringIO()))
            self._calls[call.index][1].write(call.arguments)

    def fill_choice(self, choice: pb.Choice) -> None:
        choice.reasoning = self._reasoning.getvalue()
        for call, arguments in self._calls:
            call.arguments_json = arguments.getvalue()
            choice.tool_calls.append(call)


def _required(request: pb.GenerateOneRequest | pb.CompleteRequest) -> pb.GenerationStart:
    if not request.HasField("start"):
        raise invalid("start", "is required")
    return request.start
