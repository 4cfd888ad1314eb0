"""One request on its way through the service: checked, prepared, queued, and ended exactly once, whatever happens.

Every way out leads through ``_finish``: a refusal, a cancel during preparation, the engine's own end, an error of ours.
Knows neither how the request came nor how its output is carried.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.rpc import status_pb2
from opentelemetry.trace import INVALID_SPAN, Span

from penstock.clients.host.error_frames import release_frames
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.allowance import Rated
from penstock.scheduler.request import (
    Change,
    Context,
    EngineFinishReason,
    Event,
    PromptLogprobsChunk,
    Refused,
    Request,
    RequestAccepted,
    RequestFinished,
    RequestTimings,
    SequenceDelta,
    TokenUsage,
)
from penstock.service.auth.identity import Principal
from penstock.service.errors import (
    Reason,
    ServiceError,
    ending_status,
    from_exception,
    from_refusal,
    status_code,
    to_status,
)
from penstock.service.requests.contexts import ContextStore, StoredContext
from penstock.service.requests.generate import Origin, RequestBuilder, ResponseMode, output_form
from penstock.service.streaming.messages import finished_message, milliseconds
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import Telemetry
from penstock.v1 import generation_pb2 as pb

_log = logging.getLogger(__name__)

ORDER_WAIT_S = 0.02
"""How long a prepared request waits for the one that its stream sent before it: a long prompt may be overtaken."""
MAX_EARLY_UPDATES = 16
"""That wait until a request's prompt is tokenized."""

Refuse = Callable[[ServiceError], None]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What every request needs of the service."""

    engine: Engine
    converter: RequestBuilder
    telemetry: Telemetry
    conversations: ContextStore


class RequestLifecycle:
    """One request from ``begin_request`` to its end: ``receiver.finished`` is called exactly once, last, and ``on_end``
    after it."""

    def __init__(
        self,
        surroundings: RequestContext,
        start: pb.Start,
        *,
        request_id: str,
        caller: Principal,
        receiver: RequestReceiver,
        on_end: Callable[["RequestLifecycle"], None],
        answer: ResponseMode = ResponseMode.STREAMED,
        time_left_s: float | None = None,
    ) -> None:
        """``start`` is the argument that ``begin_request`` will get. ``time_left_s`` is the deadline of a request that
        has none of its own."""
        self.request_id = request_id
        self.ref = start.ref
        self.status = status_pb2.Status()
        """How it ended, once it has."""
        self.was_accepted = False
        """Whether it entered the queue."""
        self.preparation: asyncio.Task[None] | None = None
        """Done when the request is in the queue, or never will be."""
        self._surroundings = surroundings
        self._client_request_id = start.client_request_id
        self._continues = start.continue_from
        self._caller = caller
        self._tenant = caller.tenant
        self._receiver = receiver
        self._on_end = on_end
        self._answer = answer
        self._arrival = time.monotonic()
        self._operation = "chat" if start.HasField("chat") else "text_completion"
        self._meter = surroundings.telemetry.metrics.request(self._arrival)
        if start.HasField("timeout_ms"):
            time_left_s = start.timeout_ms / 1000
        self._deadline = None if time_left_s is None else self._arrival + time_left_s
        self._limit: asyncio.Timeout | None = None
        """What keeps the deadline during the preparation."""
        self._request: Request | None = None
        self._is_queued = False
        """Whether the engine has it, or had it."""
        self._early: list[tuple[Change, Refuse]] = []
        """Updates that came before."""
        self._held = False
        self._refusal: ServiceError | None = None
        """Why it ended, where it was not the engine that ended it."""
        self._had_output = False
        self._done = False
        self._span: Span = INVALID_SPAN

    def begin_request(self, start: pb.Start, after: "asyncio.Task[None] | None" = None) -> None:
        """Checks the request and has it prepared; it enters the queue after the one that ``after`` prepares, unless
        that takes long. Never raises. ``start`` is not kept: its prompt may have 4 MiB."""
        try:
            self._tenant = self._caller.tenant_for(start.tenant)
            self._surroundings.engine.charge(self._tenant, Rated.REQUEST)  # first: a refusal counts too
            self._surroundings.converter.check(start)
            self._form = output_form(start)
            context = self._context()
            self._span = self._surroundings.telemetry.request(
                self.request_id, self._tenant, self._operation, start.traceparent
            )
            origin = Origin(self.request_id, self._tenant, self._arrival, self._deadline)
            self.preparation = asyncio.create_task(self._enter(start, context, origin, after))
        except Exception as error:
            self._refuse(error)

    def cancel(self, reason: EngineFinishReason = EngineFinishReason.CANCELLED, message: str = "") -> None:
        """Ends the request, wherever it is; nothing if it has ended."""
        if self._done or (self._request is not None and self._abort(reason, message)):
            return
        self._finish(self._unqueued(reason, message))
        if self.preparation is not None:
            self.preparation.cancel()

    def update(self, update: pb.Update, refuse: Refuse) -> None:
        """Changes the request; one that is being prepared, as soon as it is queued. ``refuse`` is called, once and
        perhaps later, where that cannot be; the request then goes on as it was."""
        change = Change(
            priority=update.priority if update.HasField("priority") else None,
            deadline=time.monotonic() + update.timeout_ms / 1000 if update.HasField("timeout_ms") else None,
            max_tokens=update.max_tokens if update.HasField("max_tokens") else None,
        )
        if self._is_queued:
            self._change(change, refuse)
        elif len(self._early) == MAX_EARLY_UPDATES:
            refuse(ServiceError(Reason.PREPARATION_FULL, "too many updates wait for the prompt to be tokenized"))
        else:
            self._early.append((change, refuse))
            if change.deadline is not None and change.max_tokens is None:  # which alone can be refused later
                self._move_deadline(change.deadline)

    def hold(self, held: bool) -> None:
        """While it is held it costs no step: nobody reads what it brings."""
        self._held = held
        if self._is_queued:
            self._surroundings.engine.hold(self.request_id, held)

    def _context(self) -> StoredContext | None:
        if not self._continues:
            return None
        kept = self._surroundings.conversations.find(self._continues, self._tenant)
        if kept is None:
            raise ServiceError(Reason.CONTEXT_NOT_FOUND, field="continue_from")
        return kept

    async def _enter(
        self, start: pb.Start, context: StoredContext | None, origin: Origin, after: "asyncio.Task[None] | None"
    ) -> None:
        try:
            request = await self._prepared(start, context, origin)
            del start, context
            if after is not None and not after.done():
                await asyncio.wait({after}, timeout=ORDER_WAIT_S)
            request.deadline = self._deadline
            self._request = request
            self._surroundings.engine.submit(request)
            self._catch_up()
        except (Exception, asyncio.CancelledError) as error:
            # A cancel of ours has ended the request already; any other one must not leave it without an end.
            self._refuse(error)

    async def _prepared(self, start: pb.Start, context: StoredContext | None, origin: Origin) -> Request:
        converter = self._surroundings.converter
        left = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                self._limit = limit
                return await converter.prepare(start, origin, self._on_event, self._answer, context)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServiceError(Reason.DEADLINE, "the deadline passed before the prompt was tokenized") from None
        finally:
            self._limit = None

    def _move_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + deadline - time.monotonic())

    def _catch_up(self) -> None:
        """What was said during the preparation."""
        if self._done:
            return  # what told its caller that it was accepted failed, and so it ended
        self._is_queued = True
        early, self._early = self._early, []
        for change, refuse in early:
            self._change(change, refuse)
        if self._held:
            self._surroundings.engine.hold(self.request_id, True)

    def _change(self, change: Change, refuse: Refuse) -> None:
        assert self._request is not None
        try:
            if change.max_tokens is not None:
                max_tokens = self._surroundings.converter.cut_max_tokens(self._request, change.max_tokens)
                change = replace(change, max_tokens=max_tokens)
            self._surroundings.engine.update(self.request_id, change)
        except ServiceError as error:
            refuse(error)
        except Refused as error:
            refuse(from_refusal(error))

    def _on_event(self, event: Event) -> None:
        """The request's sink. The engine counts on it: it never raises."""
        if self._done:
            return
        try:
            if isinstance(event, SequenceDelta):
                self._meter.delta(event.choice)
                self._receiver.delta(self.ref, event, self._form, not self._had_output)
                self._had_output = True
            else:
                self._deliver(event)
        except Exception as error:
            self._refuse(error)

    def _deliver(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            self._finish(event)
        elif isinstance(event, PromptLogprobsChunk):
            self._receiver.prompt_logprobs(self.ref, event)
        elif isinstance(event, RequestAccepted):
            self._accept(event)

    def _accept(self, event: RequestAccepted) -> None:
        assert self._request is not None
        self.was_accepted = True
        self._receiver.accepted(
            pb.Accepted(
                ref=self.ref,
                request_id=self.request_id,
                prompt_tokens=len(self._request.prompt_token_ids),
                cached_tokens=event.cached_tokens,
                queue_position=event.queue_position,
                predicted_ttft_ms=self._from_arrival_ms(event.predicted_ttft_s),
                client_request_id=self._client_request_id,
            )
        )

    def _from_arrival_ms(self, seconds_from_now: float | None) -> int | None:
        if seconds_from_now is None:
            return None
        return milliseconds(time.monotonic() - self._arrival + seconds_from_now)

    def _refuse(self, error: BaseException) -> None:
        """Ends the request with the status that an exception stands for."""
        if self._done:
            return
        known = from_exception(error)
        if known is None:
            _log.error("request %s: an error of our own", self.request_id, exc_info=error)
            known = ServiceError(Reason.INTERNAL)
        self._refusal = known
        reason = EngineFinishReason.DEADLINE if known.reason is Reason.DEADLINE else EngineFinishReason.INTERNAL
        was_prepared = self._request is not None
        self._finish(self._unqueued(reason), to_status(known, self.request_id))
        if known is error or isinstance(error, Refused):  # else the log may not have written it yet
            release_frames(error)
        # Whatever went wrong, the engine must not go on with it. Later, since this may be the engine calling.
        if was_prepared:
            asyncio.get_running_loop().call_soon(self._abort, reason, "")

    def _abort(self, reason: EngineFinishReason, message: str) -> bool:
        return self._surroundings.engine.abort(self.request_id, reason, message)

    def _finish(self, finished: RequestFinished, status: status_pb2.Status | None = None) -> None:
        """The one way out."""
        if self._done:
            return
        self._done = True
        self.status = status or ending_status(finished.reason, finished.message, self.request_id)
        seed = self._request.sampling.seed if self._request is not None and self.was_accepted else None
        try:
            # Before its caller is told: the next request may come at once.
            is_kept = finished.context is not None and self._keep(finished.context)
            self._receiver.finished(finished_message(self.ref, self.request_id, finished, self.status, seed, is_kept))
        except Exception as error:
            _log.exception("request %s: its end cannot be delivered", self.request_id)
            self._receiver.fail(error)
        self._on_end(self)
        self._report(finished)
        # It has our sink: a circle, which would be there until the cycle collector comes by.
        self._request = None

    def _keep(self, context: Context) -> bool:
        assert self._request is not None
        return self._surroundings.conversations.keep(
            self.request_id,
            self._tenant,
            context,
            wanted=self._request.retain_s > 0,
            continues=self._continues,
        )

    def _report(self, finished: RequestFinished) -> None:
        end = End(
            request_id=self.request_id,
            client_request_id=self._client_request_id,
            tenant=self._tenant,
            operation=self._operation,
            finished=finished,
            refusal=self._refusal,
            code=status_code(self.status),
            was_accepted=self.was_accepted,
        )
        report_end(self._span, self._surroundings.telemetry.metrics, end)

    def _unqueued(self, reason: EngineFinishReason, message: str = "") -> RequestFinished:
        """The end of a request of which the engine knows nothing."""
        prompt_tokens = len(self._request.prompt_token_ids) if self._request is not None else 0
        total_us = int((time.monotonic() - self._arrival) * 1e6)
        return RequestFinished(
            reason, TokenUsage(prompt_tokens=prompt_tokens), RequestTimings(total_us=total_us), message
        )
