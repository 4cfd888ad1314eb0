"""The life cycle of a request in the service: it is checked, prepared and queued, and always ends exactly once.

Every end goes through ``_finish``: a refusal, a cancellation during preparation, the engine's end, an internal error.
Knows neither how the request arrived nor how its output is sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc
from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.clients.host.error_frames import release_frames
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.planning.rate_limit import Rated
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
    SequenceDelta,
    TokensInjected,
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
from penstock.service.requests.generate import Origin, PreparedRequest, RequestBuilder, ResponseMode, output_form
from penstock.service.requests.idempotency import IdempotencyKeys
from penstock.service.requests.injection import Injections, Refuse
from penstock.service.requests.open_prompt import OpenPrompt, OpenPromptConfig
from penstock.service.requests.preparation import preparation_limit, requested_change, unqueued_end
from penstock.service.streaming.messages import accepted_message, finished_message, injected_message
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.streaming.parsed_output import ParsingReceiver
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import NO_SPAN, Telemetry

_log = logging.getLogger(__name__)

ORDER_WAIT_S = 0.02
"""The longest time for which a prepared request waits for the one sent before it on its stream. After that it may
overtake a long prompt."""
MAX_EARLY_UPDATES = 16
"""The maximum number of updates that wait until a request's prompt is tokenized."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts of the service that every request needs."""

    engine: Engine
    request_builder: RequestBuilder
    telemetry: Telemetry
    conversations: ContextStore
    open_prompts: OpenPromptConfig
    idempotency_keys: IdempotencyKeys


class RequestLifecycle:
    """One request, from ``begin_request`` to its end. ``receiver.finished`` is called exactly once, as the last of the
    receiver's methods, and ``on_end`` after it."""

    def __init__(
        self,
        request_context: RequestContext,
        start: pb.GenerationStart,
        *,
        request_id: str,
        principal: Principal,
        receiver: RequestReceiver,
        on_end: Callable[["RequestLifecycle"], None],
        answer: ResponseMode = ResponseMode.STREAMED,
        time_left_s: float | None = None,
    ) -> None:
        """``start`` is the later argument of ``begin_request``. ``time_left_s`` is the time to the deadline, unless
        ``start`` sets its own."""
        self.request_id = request_id
        self.ref = start.ref
        self.status = status_pb2.Status()
        """The request's status, after its end."""
        self.prompt_token_ids: Sequence[int] = ()
        """The tokens of the prompt, once it is prepared."""
        self.was_accepted = False
        """Whether it entered the queue."""
        self.preparation: asyncio.Task[None] | None = None
        """Done when the request is in the queue or has failed to get there."""
        self._request_context = request_context
        self._client_request_id = start.client_request_id
        self._continues = start.continue_from
        self._principal = principal
        self._tenant = principal.tenant
        self._receiver = receiver
        self._on_end = on_end
        self._answer = answer
        self._arrival = time.monotonic()
        self._operation = "chat" if start.HasField("chat") else "text_completion"
        self._meter = request_context.telemetry.metrics.request(self._arrival)
        if start.HasField("timeout_ms"):
            time_left_s = start.timeout_ms / 1000
        self._deadline = None if time_left_s is None else self._arrival + time_left_s
        self._limit: asyncio.Timeout | None = None
        """The deadline's timer during the preparation."""
        self._request: Request | None = None
        self._is_queued = False
        """Whether the request has been submitted to the engine."""
        self._early: list[tuple[Change, Refuse]] = []
        """Updates that arrived before that."""
        self._open: OpenPrompt | None = None
        """The prompt, until it is committed."""
        self._injections = Injections(request_context.engine, request_context.request_builder, request_id, start)
        self._idempotency_key = start.idempotency_key
        self._held = False
        self._refusal: ServiceError | None = None
        """The error that ended the request, unless the engine ended it."""
        self._had_output = False
        self._done = False
        self._span = NO_SPAN

    @property
    def has_ended(self) -> bool:
        return self._done

    def begin_request(self, start: pb.GenerationStart, after: "asyncio.Task[None] | None" = None) -> None:
        """Checks the request and starts its preparation, unless its prompt is open. It enters the queue after the
        request that ``after`` prepares, unless that takes long. Never raises. Keeps no reference to ``start``, whose
        prompt may have 4 MiB."""
        try:
            self._tenant = self._principal.tenant_for(start.tenant)
            self._request_context.engine.charge(self._tenant, Rated.REQUEST)  # first: a refusal counts too
            self._request_context.request_builder.check(start)
            self._form = output_form(start)
            context = self._context()
            if self._idempotency_key:
                self._request_context.idempotency_keys.begin(self._tenant, self._idempotency_key, self.request_id)
            self._span = self._request_context.telemetry.request(
                self.request_id, self._tenant, self._operation, start.traceparent
            )
            if start.open:
                self._open = OpenPrompt(self._request_context.open_prompts, start, self._tenant, self._expire)
                self._open.begin_warm_ups(self.request_id)
            else:
                self._prepare(start, context, after)
        except Exception as error:
            self._refuse(error)

    def commit(self, after: "asyncio.Task[None] | None" = None) -> bool:
        """Ends the open prompt and starts the preparation; returns False if the prompt is not open. ``after``: see
        ``begin_request``."""
        if self._open is None or self._done:
            return False
        try:
            start = self._open.whole()
            self._close_prompt()
            self._request_context.request_builder.check(start)
            self._operation = "chat" if start.HasField("chat") else "text_completion"
            self._prepare(start, self._context(), after)
        except Exception as error:
            self._refuse(error)
        return True

    def append(self, append: pb.GenerationAppend, refuse: Refuse) -> None:
        """Adds a piece to the open prompt; otherwise injects it. If it is refused, calls ``refuse`` once, perhaps
        later, and the request continues unchanged."""
        try:
            self._request_context.request_builder.check_append(append)
            if self._open is not None:
                self._open.append(append)
                return
            if append.HasField("replace_from"):
                raise ServiceError(Reason.NOT_OPEN, field="replace_from")
        except ServiceError as error:
            refuse(error)
            return
        self._injections.add(append, self._tenant, refuse, self.preparation)

    def _expire(self) -> None:
        self._refuse(ServiceError(Reason.OPEN_PROMPT_EXPIRED))

    def _close_prompt(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _prepare(
        self, start: pb.GenerationStart, context: StoredContext | None, after: "asyncio.Task[None] | None"
    ) -> None:
        origin = Origin(self.request_id, self._tenant, self._arrival, self._deadline)
        self.preparation = asyncio.create_task(self._enter(start, context, origin, after))

    def cancel(self, reason: EngineFinishReason = EngineFinishReason.CANCELLED, message: str = "") -> None:
        """Ends the request in any state. Does nothing if it has ended."""
        abort = self._request_context.engine.abort
        if self._done or (self._request is not None and abort(self.request_id, reason, message)):
            return
        self._finish(unqueued_end(reason, self._request, self._arrival, message))
        if self.preparation is not None:
            self.preparation.cancel()

    def update(self, update: pb.GenerationUpdate, refuse: Refuse) -> None:
        """Changes the request; during its preparation, as soon as it is queued. If the change is refused, calls
        ``refuse`` once, perhaps later, and the request continues unchanged."""
        change = requested_change(update)
        if self._is_queued:
            self._change(change, refuse)
        elif len(self._early) == MAX_EARLY_UPDATES:
            refuse(ServiceError(Reason.PREPARATION_FULL, "too many updates wait for the prompt to be tokenized"))
        else:
            self._early.append((change, refuse))
            if change.deadline is not None and change.max_tokens is None:  # only max_tokens can be refused later
                self._move_deadline(change.deadline)

    def hold(self, held: bool) -> None:
        """Pauses the request, so that it takes no part in steps while its output is not read, or resumes it."""
        self._held = held
        if self._is_queued:
            self._request_context.engine.hold(self.request_id, held)

    def _context(self) -> StoredContext | None:
        conversations = self._request_context.conversations
        return conversations.existing(self._continues, self._tenant) if self._continues else None

    async def _enter(
        self,
        start: pb.GenerationStart,
        context: StoredContext | None,
        origin: Origin,
        after: "asyncio.Task[None] | None",
    ) -> None:
        try:
            request, parsers = await self._prepared(start, context, origin)
            del start, context
            if parsers:
                self._receiver, self._form = ParsingReceiver(self._receiver, parsers), self._form._replace(parsed=True)
            if after is not None and not after.done():
                await asyncio.wait({after}, timeout=ORDER_WAIT_S)
            request.deadline = self._deadline
            self._request, self.prompt_token_ids = request, request.prompt_token_ids
            self._request_context.engine.submit(request)
            self._catch_up()
        except (Exception, asyncio.CancelledError) as error:
            # ``cancel`` has already ended the request; any other cancellation must not leave it without an end.
            self._refuse(error)

    async def _prepared(
        self, start: pb.GenerationStart, context: StoredContext | None, origin: Origin
    ) -> PreparedRequest:
        request_builder = self._request_context.request_builder
        try:
            async with preparation_limit(self._deadline, "the prompt was tokenized") as self._limit:
                return await request_builder.prepare(start, origin, self._on_event, self._answer, context)
        finally:
            self._limit = None

    def _move_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + deadline - time.monotonic())

    def _catch_up(self) -> None:
        """Applies the updates and pauses that arrived during the preparation."""
        if self._done:
            return  # the message that accepts it could not be delivered, which ended it
        self._is_queued = True
        early, self._early = self._early, []
        for change, refuse in early:
            self._change(change, refuse)
        if self._held:
            self._request_context.engine.hold(self.request_id, True)

    def _change(self, change: Change, refuse: Refuse) -> None:
        assert self._request is not None
        try:
            if change.max_tokens is not None:
                max_tokens = self._request_context.request_builder.cut_max_tokens(self._request, change.max_tokens)
                change = replace(change, max_tokens=max_tokens)
            self._request_context.engine.update(self.request_id, change)
        except ServiceError as error:
            refuse(error)
        except Refused as error:
            refuse(from_refusal(error))

    def _on_event(self, event: Event) -> None:
        """Receives the engine's events. Never raises, on which the engine relies."""
        if self._done:
            return
        try:
            if isinstance(event, SequenceDelta):
                self._meter.delta(event.choice, len(event.token_ids))
                self._receiver.delta(self.ref, event, self._form, not self._had_output)
                self._had_output = True
            elif isinstance(event, RequestFinished):
                self._finish(event)
            elif isinstance(event, PromptLogprobsChunk):
                self._receiver.prompt_logprobs(self.ref, event)
            elif isinstance(event, RequestAccepted):
                self._accept(event)
            elif isinstance(event, TokensInjected):
                self._injections.injected()
                self._receiver.injected(injected_message(self.ref, event))
        except Exception as error:
            self._refuse(error)

    def _accept(self, event: RequestAccepted) -> None:
        assert self._request is not None
        self.was_accepted = True
        if self._span.is_recording:
            self._span.timeline = self._request_context.engine.explain(self.request_id)
        self._receiver.accepted(
            accepted_message(
                self.ref,
                self.request_id,
                self._client_request_id,
                len(self._request.prompt_token_ids),
                event,
                time.monotonic() - self._arrival,
            )
        )

    def _refuse(self, error: BaseException) -> None:
        """Ends the request with the status of an exception."""
        if self._done:
            return
        known = from_exception(error)
        if known is None:
            _log.error("request %s: internal error", self.request_id, exc_info=error)
            known = ServiceError(Reason.INTERNAL)
        self._refusal = known
        is_late = known.code is grpc.StatusCode.DEADLINE_EXCEEDED
        reason = EngineFinishReason.DEADLINE if is_late else EngineFinishReason.INTERNAL
        was_prepared = self._request is not None
        self._finish(unqueued_end(reason, self._request, self._arrival), to_status(known, self.request_id))
        if known is error or isinstance(error, Refused):  # other errors' frames may still be needed by the log
            release_frames(error)
        # The engine must not continue the request. Aborted later, because the engine may be the caller.
        if was_prepared:
            asyncio.get_running_loop().call_soon(self._request_context.engine.abort, self.request_id, reason)

    def _finish(self, finished: RequestFinished, status: status_pb2.Status | None = None) -> None:
        """Ends the request. Every end goes through here."""
        if self._done:
            return
        self._done = True
        self._close_prompt()
        self._injections.close()
        self.status = status or ending_status(finished.reason, finished.message, self.request_id)
        if self._idempotency_key:
            self._request_context.idempotency_keys.end(
                self._tenant, self._idempotency_key, self.request_id, succeeded=not self.status.code
            )
        seed = self._request.sampling.seed if self._request is not None and self.was_accepted else None
        try:
            # Stored before the client learns of the end: the next request may arrive at once.
            is_kept = finished.context is not None and self._keep(finished.context)
            self._receiver.finished(finished_message(self.ref, self.request_id, finished, self.status, seed, is_kept))
        except Exception as error:
            _log.exception("request %s: its end could not be delivered", self.request_id)
            self._receiver.fail(error)
        self._on_end(self)
        self._report(finished)
        # It refers to this object's sink: a reference cycle, which would remain until the garbage collector runs.
        self._request = None

    def _keep(self, context: Context) -> bool:
        assert self._request is not None
        return self._request_context.conversations.keep(
            self.request_id, self._tenant, context, wanted=self._request.retain_s > 0, continues=self._continues
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
        report_end(self._span, self._request_context.telemetry.metrics, end)
