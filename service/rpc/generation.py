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
from penstock.service.errors import Reason, ServiceError, StatusError, invalid, with_finished
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.lifecycle import RequestContext, RequestLifecycle
from penstock.service.rpc.frame_handler import FrameHandler
from penstock.service.rpc.interceptor import current_request_id
from penstock.service.streaming.buffer_budget import BufferBudget, WritePacer
from penstock.service.streaming.messages import fill_delta, fill_logprobs, single_message, stream_message
from penstock.service.streaming.outbox import HEARTBEAT_S, Outbox
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
        stream = FrameHandler(self.new_request, outbox, self._validator)
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


class _WholeAnswer:
    """Collects a request's output into one response."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[pb.CompleteResponse] = asyncio.get_running_loop().create_future()
        self._response = pb.CompleteResponse()
        """Filled as output arrives: filling all of it at the end would block the event loop."""
        self._texts: list[StringIO] = []
        """The text of each choice. A string in a message would be copied with each delta."""

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
        fill_delta(self._response.choices[delta.choice], form._replace(text=False), [delta])

    def injected(self, injected: pb.Injected) -> None:
        """Never called: nothing can be appended to the request of a single call."""

    def finished(self, finished: pb.Finished) -> None:
        self._response.request_id = finished.request_id
        self._response.finished.CopyFrom(finished)
        for choice, text in zip(self._response.choices, self._texts, strict=True):
            choice.text = text.getvalue()
        if not self.whole.done():
            self.whole.set_result(self._response)

    def fail(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


def _required(request: pb.GenerateOneRequest | pb.CompleteRequest) -> pb.GenerationStart:
    if not request.HasField("start"):
        raise invalid("start", "is required")
    if request.start.open:
        raise invalid("start.open", "only on a Generate stream; omit it, or send all of the prompt here")
    return request.start
