"""The life cycle of a request in the service: it is checked, prepared and queued, and always ends exactly once.

Every end goes through ``_finish``: a refusal, a cancellation during preparation, the engine's end, an internal error.
Knows neither how the request arrived nor how its output is sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import grpc
from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.clients.host.error_frames import release_frames
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
from penstock.service.errors import Reason, ServiceError, ending_status, from_exception, status_code, to_status
from penstock.service.requests.contexts import StoredContext
from penstock.service.requests.generate import ResponseMode
from penstock.service.requests.live.changes import apply_change, requested_change
from penstock.service.requests.live.injection import Injections, Refuse
from penstock.service.requests.live.open_prompt import OpenPrompt, Prepare
from penstock.service.requests.live.request_context import RequestContext
from penstock.service.requests.live.superseding import Replaceable, mark_superseded, replace_later
from penstock.service.requests.preparation import Origin, preparation_limit, unqueued_end
from penstock.service.requests.resumption import PreparedRequest
from penstock.service.streaming.messages import accepted_message, finished_message, injected_message
from penstock.service.streaming.outbox import RequestReceiver
from penstock.service.telemetry.metrics import End
from penstock.service.telemetry.request_end import report_end
from penstock.service.telemetry.tracing import NO_SPAN

_log = logging.getLogger(__name__)

ORDER_WAIT_S = 0.02
"""How long a prepared request waits for the one before it on its stream. After that, it may overtake it."""
MAX_EARLY_UPDATES = 16
"""The maximum number of updates that wait until a request's prompt is tokenized."""


class RequestLifecycle:
    """One request, from ``begin_request`` to its end. ``receiver.finished`` is called exactly once, as the last of the
    receiver's methods, and ``on_end`` after it."""

    _beginning: PreparedRequest | None = None
    """Set from its preparation until it is accepted."""

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
        self.finished: RequestFinished | None = None
        """How the request ended; None before its end."""
        self.prompt_token_ids: Sequence[int] = ()
        """The tokens of the prompt, once it is prepared."""
        self.was_accepted = False
        """Whether it entered the queue."""
        self.supersedes: Replaceable | None = None
        """The request that this one replaces when it is accepted."""
        self.superseded_by = 0
        """The ref of the request that replaces this one."""
        self.preparation: asyncio.Task[None] | None = None
        """Done when the request is in the queue or has failed to get there."""
        self._request_context = request_context
        self._client_request_id = start.client_request_id
        self._continues = start.continue_from
        self._session_id = start.session_id
        self._principal = principal
        self.tenant = principal.tenant
        self._receiver = receiver
        self._on_end = on_end
        self._answer = answer
        self._arrival, self._committed = time.monotonic(), 0.0
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
        self._injections = Injections(request_context.engine, request_context.request_builder, request_id)
        self._idempotency_key = start.idempotency_key
        self._held = self._had_output = False
        self._refusal: ServiceError | None = None
        """The error that ended the request, unless the engine ended it."""
        self._span = NO_SPAN

    @property
    def has_ended(self) -> bool:
        return self.finished is not None

    def begin_request(
        self,
        start: pb.GenerationStart,
        after: asyncio.Task[None] | None = None,
        supersedes: Replaceable | None = None,
        *,
        takes_appends: bool = False,
    ) -> None:
        """Checks the request and starts its preparation, unless its prompt is open. It enters the queue in place of
        ``supersedes``, after the request that ``after`` prepares, unless that takes long. With ``takes_appends``,
        content may be injected into its output. Never raises. Keeps no reference to ``start``, whose prompt may have
        4 MiB."""
        try:
            self.tenant = self._principal.tenant_for(start.tenant)
            self._request_context.engine.charge(self.tenant, Rated.REQUEST)  # first: a refusal counts too
            self._request_context.request_builder.adapters.find(start.model, self.tenant)
            self._request_context.request_builder.check(start)
            if takes_appends:
                self._injections.allow(start)
            self._form = self._request_context.request_builder.output_form(start)
            replace_later(self, supersedes)
            context = self._context()
            if self._idempotency_key:
                self._request_context.idempotency_keys.begin(self.tenant, self._idempotency_key, self.request_id)
            self._span = self._request_context.telemetry.request(
                self.request_id, self.tenant, self._operation, start.traceparent, start.session_id
            )
            if self._session_id:
                returns = self._request_context.conversations.return_times
                returns.began(self.tenant, self._session_id, counts_for_tenant=not self._continues)
            if start.open:
                if self._request_context.engine.is_draining:
                    raise ServiceError(Reason.DRAINING)
                self._open = OpenPrompt(self._request_context.open_prompts, start, self.tenant, self._refuse)
                self._open.begin_warm_ups(self.request_id, self._deadline)
            else:
                self._prepare(partial(self._request_context.request_builder.prepare, start), context, after)
        except Exception as error:
            self._refuse(error)

    def commit(self, after: "asyncio.Task[None] | None" = None) -> bool:
        """Ends the open prompt and starts the preparation; returns False if the prompt is not open. ``after``: see
        ``begin_request``."""
        if self._open is None or self.has_ended:
            return False
        try:
            prompt = self._open.committed()
            self._operation = "chat" if self._open.is_chat else "text_completion"
            self._close_prompt()
            self._committed = time.monotonic()
            self._prepare(partial(prompt.prepare, self._request_context.request_builder), self._context(), after)
        except Exception as error:
            self._refuse(error)
        return True

    def append(self, append: pb.GenerationAppend, refuse: Refuse) -> None:
        """Adds a piece to the open prompt; otherwise injects it. If it is refused, calls ``refuse`` once, perhaps
        later, and the request continues unchanged."""
        try:
            prompt = self._injections if self._open is None else self._open
            self._request_context.request_builder.check_append(append, prompt.shows_tools)
            if self._open is not None:
                self._open.append(append)
                return
            if append.HasField("replace_from"):
                raise ServiceError(Reason.NOT_OPEN, field="replace_from")
        except ServiceError as error:
            refuse(error)
            return
        self._injections.add(append, self.tenant, refuse, self.preparation)

    def drain(self) -> None:
        """Ends the request if its prompt is open: it could not enter the queue."""
        if self._open is not None:
            self._refuse(ServiceError(Reason.DRAINING))

    def _close_prompt(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _prepare(self, prepare: Prepare, context: StoredContext | None, after: "asyncio.Task[None] | None") -> None:
        self.preparation = asyncio.create_task(self._enter(prepare, context, after))

    def cancel(self, reason: EngineFinishReason = EngineFinishReason.CANCELLED, message: str = "") -> None:
        """Ends the request in any state. Does nothing if it has ended."""
        abort = self._request_context.engine.abort
        if self.has_ended or (self._request is not None and abort(self.request_id, reason, message)):
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
            return
        is_deadline = change.max_tokens is None and change.priority is None
        if not is_deadline and len(self._early) == MAX_EARLY_UPDATES:
            refuse(ServiceError(Reason.PREPARATION_FULL, "too many updates wait for the prompt to be tokenized"))
            return
        if not is_deadline:
            self._early.append((change, refuse))
        if change.deadline is not None and (change.max_tokens is None or self._open is not None):
            self._move_deadline(change.deadline)  # at once: only max_tokens can be refused later
            self._early = [(replace(early, deadline=None), each) for early, each in self._early]

    def hold(self, held: bool) -> None:
        """Pauses the request, so that it takes no part in steps while its output is not read, or resumes it."""
        self._held = held
        if self._is_queued:
            self._request_context.engine.hold(self.request_id, held)

    def _context(self) -> StoredContext | None:
        conversations = self._request_context.conversations
        return conversations.existing(self._continues, self.tenant) if self._continues else None

    async def _enter(self, prepare: Prepare, context: StoredContext | None, after: "asyncio.Task[None] | None") -> None:
        try:
            prepared = await self._prepared(prepare, context)
            del prepare, context
            self._receiver, self._form = prepared.received_by(self._receiver, self._form)
            request, self._beginning = prepared.request, prepared
            if after is not None and not after.done():
                await asyncio.wait({after}, timeout=ORDER_WAIT_S)
            request.deadline = self._deadline
            superseded = mark_superseded(self)
            request.supersedes = superseded[-1].request_id if superseded else ""
            self._request, self.prompt_token_ids = request, request.prompt_token_ids
            self._request_context.engine.submit(request)  # ends the last one, the only one that may be queued
            self.supersedes = None
            for live in superseded:
                live.cancel(EngineFinishReason.SUPERSEDED)
            self._catch_up()
        except (Exception, asyncio.CancelledError) as error:
            # ``cancel`` has already ended the request; any other cancellation must not leave it without an end.
            self._refuse(error)

    async def _prepared(self, prepare: Prepare, context: StoredContext | None) -> PreparedRequest:
        origin = Origin(self.request_id, self.tenant, self._arrival, self._deadline, self._committed)
        try:
            async with preparation_limit(self._deadline, "the prompt was tokenized") as self._limit:
                return await prepare(origin, self._on_event, self._answer, context)
        finally:
            self._limit = None

    def _move_deadline(self, deadline: float) -> None:
        self._deadline = deadline
        if self._open is not None:
            self._open.set_deadline(deadline)
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + deadline - time.monotonic())

    def _catch_up(self) -> None:
        """Applies the updates and pauses that arrived during the preparation."""
        if self.has_ended:
            return  # the message that accepts it could not be delivered, which ended it
        self._is_queued = True
        early, self._early = self._early, []
        for change, refuse in early:
            self._change(change, refuse)
        if self._held:
            self._request_context.engine.hold(self.request_id, True)

    def _change(self, change: Change, refuse: Refuse) -> None:
        assert self._request is not None
        apply_change(self._request_context.engine, self._request_context.request_builder, self._request, change, refuse)

    def _on_event(self, event: Event) -> None:
        """Receives the engine's events. Never raises, on which the engine relies."""
        if self.has_ended:
            return
        try:
            if isinstance(event, SequenceDelta):
                self._meter.delta(event.choice, len(event.token_ids))
                self._receiver.delta(self.ref, event, self._form, not self._had_output)
                self._had_output = True
            elif isinstance(event, RequestFinished):
                self._finish(event)
            elif isinstance(event, PromptLogprobsChunk):
                self._receiver.prompt_logprobs(self.ref, event, self._form)
            elif isinstance(event, RequestAccepted):
                self._accept(event)
            elif isinstance(event, TokensInjected):
                self._receiver.injected(injected_message(self.ref, event, self._injections.take_injected()))
        except Exception as error:
            self._refuse(error)

    def _accept(self, event: RequestAccepted) -> None:
        beginning, self._beginning = self._beginning, None
        assert beginning is not None
        self.was_accepted = True
        if self._span.is_recording:
            self._span.timeline = self._request_context.engine.explain(self.request_id)
        num_tokens, age_s = len(self.prompt_token_ids), time.monotonic() - self._arrival
        ids = (self.ref, self.request_id, self._client_request_id)
        self._receiver.accepted(accepted_message(*ids, num_tokens, event, age_s, beginning.ticket))
        beginning.replay(self._receiver, self.ref, self._form)

    def _refuse(self, error: BaseException) -> None:
        """Ends the request with the status of an exception."""
        if self.has_ended:
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
        if self.has_ended:
            return
        self.finished = finished
        self._close_prompt()
        self._injections.close()
        self.status = status or ending_status(finished.reason, finished.message, self.request_id)
        if self._idempotency_key:
            self._request_context.idempotency_keys.end(
                self.tenant, self._idempotency_key, self.request_id, succeeded=not self.status.code
            )
        seed = self._request.sampling.seed if self._request is not None and self.was_accepted else None
        try:
            # Stored before the client learns of the end: the next request may arrive at once.
            is_kept = finished.context is not None and self._keep(finished.context)
            refs = (self.ref, self.superseded_by)
            self._receiver.finished(finished_message(*refs, self.request_id, finished, self.status, seed, is_kept))
        except Exception as error:
            _log.exception("request %s: its end could not be delivered", self.request_id)
            self._receiver.fail(error)
        self._on_end(self)
        self._report(finished)
        # It refers to this object's sink: a reference cycle, which would remain until the garbage collector runs.
        self._request = self._beginning = None

    def _keep(self, context: Context) -> bool:
        assert self._request is not None
        conversations, wanted = self._request_context.conversations, self._request.retain_s > 0
        if self._session_id:
            conversations.return_times.ended(self.tenant, self._session_id)
        adapter = b"" if self._request.adapter is None else self._request.adapter.digest
        return conversations.keep(
            self.request_id, self.tenant, context, wanted=wanted, continues=self._continues, adapter=adapter
        )

    def _report(self, finished: RequestFinished) -> None:
        end = End(
            request_id=self.request_id,
            client_request_id=self._client_request_id,
            session_id=self._session_id,
            tenant=self.tenant,
            operation=self._operation,
            finished=finished,
            refusal=self._refusal,
            code=status_code(self.status),
            was_accepted=self.was_accepted,
        )
        report_end(self._span, self._request_context.telemetry.metrics, end)
