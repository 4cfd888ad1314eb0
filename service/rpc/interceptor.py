"""The outermost interceptor: gives every call an id, a span, a load report, and exactly one status from the catalogue.

By default grpc.aio ends a call that raises with UNKNOWN and the exception's text, and sends no status if the handler
raises CancelledError itself. Here both become INTERNAL with the call's id, which finds the details in the log.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from penstock.clients.host.error_frames import release_frames
from penstock.service.auth.identity import ACCESS, Access, current_principal
from penstock.service.errors import (
    Reason,
    ServiceError,
    StatusError,
    code_of,
    from_exception,
    status_code,
    to_status,
    trailers,
)
from penstock.service.rpc.load_report import CallCost, LoadReporter, Trailers, current_cost
from penstock.service.telemetry.tracing import Telemetry
from penstock.service.transport.call_end import abort, write
from penstock.service.transport.call_limits import MAX_OPEN_MESSAGE_BYTES, CallLimits
from penstock.service.transport.connections import peer_of
from penstock.service.transport.message_size import SHORT_BYTES, check_parts
from penstock.service.transport.request_id import new_request_id
from penstock.service.transport.unread import UnreadAnswers

_log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 1.0
"""How long a call's status waits, at most, behind messages that the client does not read."""

current_request_id: ContextVar[str] = ContextVar("current_request_id")
"""The id of this task's call; on single-request methods it is also the request's id."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Maps all exceptions of handlers to statuses. Must be the first interceptor in the list."""

    def __init__(self, telemetry: Telemetry, limits: CallLimits, load: LoadReporter) -> None:
        self._telemetry = telemetry
        self._limits = limits
        self._load = load

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Returns the method's guarded handler; None for an unknown method, which gRPC itself refuses."""
        current_request_id.set(new_request_id())
        current_cost.set(CallCost())
        try:
            handler = await continuation(handler_call_details)
        except (Exception, asyncio.CancelledError) as error:
            if _is_being_cancelled():
                raise
            handler = _failing(error)
        return handler if handler is None else self._guarded(handler, handler_call_details)

    def _guarded(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        parse = handler.request_deserializer or _as_it_is
        serialize = handler.response_serializer or _as_it_is
        is_open = ACCESS.get(details.method) is Access.OPEN
        limits = self._limits

        async def run(context: Context, owner: str) -> Any:
            if handler.request_streaming:
                parsed = _messages(parse, context, limits, owner, is_open)
            else:
                parsed = await _only_message(parse, context, limits, owner, is_open)
            outcome = behaviour(parsed, context)
            if inspect.isasyncgen(outcome):
                await _write_all(context, cast("AsyncGenerator[Any, None]", outcome))
                return None
            message = await outcome
            if handler.response_streaming:
                return None
            # Serialized here, so that a failure becomes INTERNAL instead of gRPC's UNKNOWN.
            raw = serialize(message)
            if is_open:  # it counts among the open calls until it has been sent
                await context.send_initial_metadata(())
                await write(context, raw)
                return None
            limits.answers.add_answer(owner, current_request_id.get(), len(raw))
            return raw

        async def run_within_limits(context: Context, peer: str, tenant: str | None) -> Any:
            if not is_open:
                return await run(context, tenant or "")
            host, _ = peer_of(peer) or ("", 0)
            async with limits.open_calls.place(host):
                return await run(context, host)

        async def answer(request_iterator: Any, context: Context) -> Any:
            request_id, peer = current_request_id.get(), context.peer()
            tenant = getattr(current_principal.get(None), "tenant", None)
            limits.connections.begin_call(peer, tenant)
            try:
                with self._telemetry.call(details.method, details.invocation_metadata, request_id):
                    answered = await run_within_limits(context, peer, tenant)
            except BaseException as error:
                is_gone = isinstance(error, grpc.aio.InternalError)  # the client
                self._telemetry.metrics.call(details.method, grpc.StatusCode.CANCELLED if is_gone else code_of(error))
                await _end(context, error, request_id, limits.answers, self._load.trailers(current_cost.get()))
            else:
                context.set_trailing_metadata(self._load.trailers(current_cost.get()))
                self._telemetry.metrics.call(details.method, grpc.StatusCode.OK)
                return answered
            finally:
                limits.connections.end_call(peer, tenant)

        # All requests are read as streams. gRPC starts a single-message handler only when the message has arrived: a
        # call that is half-closed without a message would wait forever, and a second message would be lost silently.
        if handler.response_streaming or is_open:
            return grpc.stream_stream_rpc_method_handler(
                answer, None, lambda message: message if isinstance(message, bytes) else serialize(message)
            )
        return grpc.stream_unary_rpc_method_handler(answer, None, None)


def _failing(error: BaseException) -> Handler:
    async def fail(argument: Any, context: Any) -> None:
        raise error

    return grpc.stream_stream_rpc_method_handler(fail)


def _as_it_is(value: Any) -> Any:
    return value


async def _only_message(
    parse: Callable[[bytes], Any], context: Context, limits: CallLimits, owner: str, is_open: bool
) -> Any:
    """Reads the message of a method that takes exactly one. Raises ServiceError if there is none or a second one."""
    async with limits.messages_of(is_open).place(owner):
        if not is_open:
            await limits.answers.wait_for_room(owner)
        raw = await _read(context)
        if raw is None or await _read(context) is not None:
            raise ServiceError(Reason.MESSAGE_COUNT)
        return await _parsed(parse, raw, context.peer(), limits, owner, is_open)


async def _read(context: Context) -> bytes | None:
    """Returns the next message; None after the last."""
    raw: Any = await context.read()
    return None if raw is grpc.aio.EOF else raw


async def _write_all(context: Context, messages: AsyncGenerator[Any, None]) -> None:
    has_begun = False
    async with aclosing(messages):
        async for message in messages:
            if not has_begun:
                has_begun = True
                await context.send_initial_metadata(())
            await write(context, message)


async def _parsed(
    parse: Callable[[bytes], Any], raw: bytes, peer: str, limits: CallLimits, owner: str, is_open: bool
) -> Any:
    """Counts and parses a message. Large ones take turns, so that several at once do not block the event loop for
    long. Raises ServiceError, also if a method that needs no credentials gets a large one."""
    limits.connections.count(peer, len(raw))
    if is_open and len(raw) > MAX_OPEN_MESSAGE_BYTES:
        problem = f"a message to this method may have at most {MAX_OPEN_MESSAGE_BYTES:,} bytes; it has {len(raw):,}"
        raise ServiceError(Reason.TOO_EXPENSIVE, problem)
    # The parser in the generated code is a method of the message's class.
    descriptor: Any = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    try:
        if len(raw) <= SHORT_BYTES:
            if descriptor is not None:
                await check_parts(raw, descriptor)
            return parse(raw)
        async with limits.parse_turns.turn(owner) as turns:
            if descriptor is not None:
                await check_parts(raw, descriptor)
            with turns.portion():
                return parse(raw)
    except DecodeError:
        raise ServiceError(Reason.MALFORMED_MESSAGE) from None


async def _messages(
    parse: Callable[[bytes], Any], context: Context, limits: CallLimits, owner: str, is_open: bool
) -> AsyncIterator[Any]:
    """Yields the messages of a stream, and keeps none while it waits for the next one. After the first, a caller with
    credentials may wait for hours before the next message. Yields the error of a message that is too expensive to
    parse."""
    places, peer = limits.messages_of(is_open), context.peer()
    is_timed = True
    while True:
        async with places.place(owner) if is_timed else limits.unfinished.read(peer):
            raw = await _read(context)
            if raw is None:
                return
            try:
                parsed = [await _parsed(parse, raw, peer, limits, owner, is_open)]
            except ServiceError as error:
                if is_open or error.reason is not Reason.TOO_EXPENSIVE:
                    raise
                parsed = [error]  # a message by its form: only its sender's request fails
        is_timed = is_open
        del raw
        yield parsed.pop()


async def _end(
    context: Context, error: BaseException, request_id: str, answers: UnreadAnswers, trailing: Trailers
) -> NoReturn:
    """Ends the call with the status of ``error`` and further trailing metadata; raises the exception that gRPC expects
    then."""
    is_for_the_loop = isinstance(error, grpc.aio.AbortError | KeyboardInterrupt | SystemExit)
    if is_for_the_loop or (isinstance(error, asyncio.CancelledError) and _is_being_cancelled()):
        try:
            raise error
        finally:
            del error  # or this frame and the error's traceback would be a reference cycle, one per abandoned call
    if isinstance(error, grpc.aio.InternalError):
        # The client disconnected during a write: the status cannot be sent.
        raise asyncio.CancelledError from None
    status = _status_of(error, request_id)
    del error  # a known error has released its frames; kept, this frame would be in the next error's traceback
    try:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await abort(context, status_code(status), status.message, (*trailers(status), *trailing))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    except TimeoutError:
        task = asyncio.current_task()
        assert task is not None
        answers.ender.end(task)  # and with it the unread messages before the status
        raise asyncio.CancelledError from None


def _status_of(error: BaseException, request_id: str) -> status_pb2.Status:
    known = from_exception(error)
    if known is not None or isinstance(error, StatusError):
        release_frames(error)
    if isinstance(error, StatusError):
        return error.status
    if known is None:
        _log.error("call %s: internal error", request_id, exc_info=error)
        known = ServiceError(Reason.INTERNAL)
    return to_status(known, request_id)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
