"""Every way in which a call or a request may fail, and the google.rpc.Status that says so.

A message comes from this file, or from a named error that was written for the caller's eyes; an exception's own text
never does. Knows neither streams nor the engine's inner life.
"""

import asyncio
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused

DOMAIN = "penstock"
"""Of every ErrorInfo: with its reason it names the failure for programs."""

MAX_STATUS_BYTES = 1024
_MAX_MESSAGE_BYTES = 300
_MAX_FIELD_BYTES = 80
DONT_RETRY = -1
"""As a retry hint: trying again cannot help (a negative pushback, by gRPC's retry design)."""


class Reason(Enum):
    """The reasons of the catalogue; their names are what ErrorInfo carries."""

    INVALID_FIELD = auto()
    CONTEXT_LENGTH = auto()
    MALFORMED_MESSAGE = auto()
    MESSAGE_COUNT = auto()
    DUPLICATE_REF = auto()
    METADATA_TOO_LARGE = auto()
    TOO_LARGE = auto()
    TOO_EXPENSIVE = auto()
    NO_CHAT_TEMPLATE = auto()
    NO_TOOLS_IN_TEMPLATE = auto()
    CHAT_NOT_CONTINUABLE = auto()
    CONTEXT_NOT_FOUND = auto()
    REQUEST_UNKNOWN = auto()
    UNKNOWN_SERVICE = auto()
    UNAUTHENTICATED = auto()
    METHOD_DENIED = auto()
    TENANT_DENIED = auto()
    ADMIN_DENIED = auto()
    QUEUE_FULL = auto()
    OVERLOADED = auto()
    TENANT_BUSY = auto()
    TENANT_RATE = auto()
    TENANT_TOKENS = auto()
    TENANT_CAP = auto()
    PREPARATION_FULL = auto()
    MESSAGES_IN_FLIGHT = auto()
    READER_TOO_SLOW = auto()
    NO_GRAMMARS = auto()
    GRAMMAR = auto()
    DEAD_END = auto()
    SLOW_CONSTRAINT = auto()
    DEADLINE = auto()
    CANCELLED = auto()
    DRAINING = auto()
    SHUTDOWN = auto()
    GOING_DOWN = auto()
    WORKER_DOWN = auto()
    WORKER_DIED = auto()
    KILLED_WORKER = auto()
    INTERNAL = auto()


class CatalogueEntry(NamedTuple):
    """What the catalogue says of a reason."""

    code: grpc.StatusCode
    message: str
    """Sent where the error brings no message of its own."""
    retry_after_ms: int | None = None
    """When to try again; DONT_RETRY; or None, which leaves it to the code."""


_Code = grpc.StatusCode
CATALOGUE: Mapping[Reason, CatalogueEntry] = {
    Reason.INVALID_FIELD: CatalogueEntry(_Code.INVALID_ARGUMENT, "a field is out of its bounds"),
    Reason.CONTEXT_LENGTH: CatalogueEntry(
        _Code.INVALID_ARGUMENT, "the request does not fit in the model's context; send or ask for fewer tokens"
    ),
    Reason.MALFORMED_MESSAGE: CatalogueEntry(
        _Code.INVALID_ARGUMENT, "the message is no valid protobuf of its type; generate the stubs anew"
    ),
    # What gRPC's guide to status codes has for a violation of a request's cardinality.
    Reason.MESSAGE_COUNT: CatalogueEntry(
        _Code.UNIMPLEMENTED, "this method takes exactly one message; send one, then half-close the call"
    ),
    # As gRPC itself refuses metadata of a client that has acknowledged its bound.
    Reason.METADATA_TOO_LARGE: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "a call has at most 16 KiB of metadata; send less", DONT_RETRY
    ),
    Reason.DUPLICATE_REF: CatalogueEntry(
        _Code.INVALID_ARGUMENT, "the ref is live on this stream already; choose another"
    ),
    Reason.TOO_LARGE: CatalogueEntry(
        _Code.INVALID_ARGUMENT, "the request can never fit in the KV cache; send fewer tokens"
    ),
    Reason.TOO_EXPENSIVE: CatalogueEntry(_Code.INVALID_ARGUMENT, "the request asks for too much in all"),
    Reason.NO_CHAT_TEMPLATE: CatalogueEntry(
        _Code.FAILED_PRECONDITION, "this model has no chat template; send text or token_ids instead of chat"
    ),
    Reason.NO_TOOLS_IN_TEMPLATE: CatalogueEntry(
        _Code.FAILED_PRECONDITION,
        "this model's chat template shows no tools; leave them out, or tell of them in a message",
    ),
    Reason.CHAT_NOT_CONTINUABLE: CatalogueEntry(
        _Code.FAILED_PRECONDITION,
        "this model's chat template does not show an answer as it is, so none can be followed; send the whole "
        "conversation without continue_from, or text or token_ids with it",
    ),
    Reason.CONTEXT_NOT_FOUND: CatalogueEntry(
        _Code.NOT_FOUND, "no context is kept of that request, or not any more; send the whole context instead"
    ),
    Reason.REQUEST_UNKNOWN: CatalogueEntry(_Code.NOT_FOUND, "nothing is known of a request of this id"),
    Reason.UNKNOWN_SERVICE: CatalogueEntry(_Code.NOT_FOUND, "no service of this name is served here"),
    Reason.UNAUTHENTICATED: CatalogueEntry(
        _Code.UNAUTHENTICATED, "no valid API key or token; send the metadata 'authorization: Bearer <key>'"
    ),
    Reason.METHOD_DENIED: CatalogueEntry(_Code.PERMISSION_DENIED, "this method is not open to callers"),
    Reason.TENANT_DENIED: CatalogueEntry(
        _Code.PERMISSION_DENIED, "this caller may not act for another tenant; leave start.tenant empty"
    ),
    Reason.ADMIN_DENIED: CatalogueEntry(
        _Code.PERMISSION_DENIED,
        "this caller may not administer; add the word 'admin' to its key's line, or the right 'penstock:admin' to its "
        "token",
    ),
    Reason.QUEUE_FULL: CatalogueEntry(_Code.RESOURCE_EXHAUSTED, "the queue is full; try again", 1000),
    Reason.OVERLOADED: CatalogueEntry(_Code.RESOURCE_EXHAUSTED, "the deadline could not be met; allow more time", 1000),
    Reason.TENANT_BUSY: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "the tenant has too many live requests; try again", 1000
    ),
    Reason.TENANT_RATE: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "the tenant sends requests faster than it may; try again later", 1000
    ),
    Reason.TENANT_TOKENS: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "the tenant has used the tokens that it may have for now; try again later", 1000
    ),
    Reason.TENANT_CAP: CatalogueEntry(
        _Code.INVALID_ARGUMENT, "the request asks for more than its tenant may; ask for less"
    ),
    Reason.PREPARATION_FULL: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "too many prompts wait to be tokenized; try again", 250
    ),
    Reason.MESSAGES_IN_FLIGHT: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED,
        "too many messages were in flight, and this one took the longest; try again, or send fewer at once",
        1000,
    ),
    Reason.READER_TOO_SLOW: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED, "the stream is not read as fast as it fills; read it, or use more streams", DONT_RETRY
    ),
    Reason.NO_GRAMMARS: CatalogueEntry(
        _Code.FAILED_PRECONDITION,
        "output cannot be held to a grammar with this model's tokenizer; leave constraint out",
    ),
    Reason.GRAMMAR: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED,
        "what the output must match became too costly to follow: make the constraint simpler",
        DONT_RETRY,
    ),
    Reason.DEAD_END: CatalogueEntry(
        _Code.INVALID_ARGUMENT,
        "the constraint allows a beginning of an output that nothing can follow; correct the constraint",
    ),
    Reason.SLOW_CONSTRAINT: CatalogueEntry(
        _Code.RESOURCE_EXHAUSTED,
        "the constraint takes too long to follow; make it smaller or less ambiguous",
        DONT_RETRY,
    ),
    Reason.DEADLINE: CatalogueEntry(_Code.DEADLINE_EXCEEDED, "the deadline passed"),
    Reason.CANCELLED: CatalogueEntry(_Code.CANCELLED, "cancelled by the client"),
    Reason.DRAINING: CatalogueEntry(_Code.UNAVAILABLE, "the service takes no new requests; try another", 1000),
    Reason.SHUTDOWN: CatalogueEntry(
        _Code.UNAVAILABLE, "the service went down before the request was done; try another", 1000
    ),
    Reason.GOING_DOWN: CatalogueEntry(_Code.FAILED_PRECONDITION, "the service is going down for good; start another"),
    Reason.WORKER_DOWN: CatalogueEntry(
        _Code.UNAVAILABLE, "the worker is being started; try another replica, or try again", 5000
    ),
    Reason.WORKER_DIED: CatalogueEntry(_Code.UNAVAILABLE, "the worker died while the request ran; try again", 5000),
    Reason.KILLED_WORKER: CatalogueEntry(
        _Code.INTERNAL,
        "the request ended the worker twice while it ran alone; do not send it again, and report it to the service's "
        "operator with the request id",
    ),
    Reason.INTERNAL: CatalogueEntry(
        _Code.INTERNAL, "an error of the service; report it to its operator with the request id"
    ),
}

_REFUSALS: Mapping[RefusalKind, Reason] = {
    RefusalKind.QUEUE_FULL: Reason.QUEUE_FULL,
    RefusalKind.TOO_LARGE: Reason.TOO_LARGE,
    RefusalKind.DRAINING: Reason.DRAINING,
    RefusalKind.WORKER_DOWN: Reason.WORKER_DOWN,
    RefusalKind.DEADLINE: Reason.DEADLINE,
    RefusalKind.OVERLOADED: Reason.OVERLOADED,
    RefusalKind.TENANT_BUSY: Reason.TENANT_BUSY,
    RefusalKind.TENANT_RATE: Reason.TENANT_RATE,
    RefusalKind.TENANT_TOKENS: Reason.TENANT_TOKENS,
    RefusalKind.TENANT_CAP: Reason.TENANT_CAP,
}

_QUEUED = (Reason.QUEUE_FULL, Reason.OVERLOADED, Reason.TENANT_BUSY)
"""What passes when others are done, unless the refusal says no time."""

_ENDINGS: Mapping[EngineFinishReason, Reason | None] = {
    EngineFinishReason.STOP: None,
    EngineFinishReason.LENGTH: None,
    EngineFinishReason.CANCELLED: Reason.CANCELLED,
    EngineFinishReason.DEADLINE: Reason.DEADLINE,
    EngineFinishReason.WORKER_DIED: Reason.WORKER_DIED,
    EngineFinishReason.KILLED_WORKER: Reason.KILLED_WORKER,
    EngineFinishReason.SHUTDOWN: Reason.SHUTDOWN,
    EngineFinishReason.GRAMMAR: Reason.GRAMMAR,
    EngineFinishReason.DEAD_END: Reason.DEAD_END,
    EngineFinishReason.SLOW_CONSTRAINT: Reason.SLOW_CONSTRAINT,
    EngineFinishReason.INTERNAL: Reason.INTERNAL,
}


class ServiceError(Exception):
    """A failure out of the catalogue. ``message`` is sent to the caller as it is, so it says nothing of prompts,
    outputs, keys or our own inner life; ``field`` is a path such as ``sampling.top_p``."""

    def __init__(
        self, reason: Reason, message: str = "", *, field: str = "", retry_after_ms: int | None = None
    ) -> None:
        entry = CATALOGUE[reason]
        super().__init__(message or entry.message)
        self.reason = reason
        self.code = entry.code
        self.message = message or entry.message
        self.field = field
        self.retry_after_ms = entry.retry_after_ms if retry_after_ms is None else retry_after_ms


class StatusError(Exception):
    """Ends a call with a status that is made already: that of the one request which the call carried."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def invalid(field: str, problem: str, reason: Reason = Reason.INVALID_FIELD) -> ServiceError:
    """A field out of its bounds: ``problem`` says what is wrong and what would be right."""
    return ServiceError(reason, f"{field}: {problem}", field=field)


def from_refusal(refused: Refused) -> ServiceError:
    """The engine's refusal in the catalogue's terms."""
    reason, message, retry_after_ms = _REFUSALS[refused.kind], refused.message, refused.retry_after_ms
    if reason in (Reason.DRAINING, Reason.WORKER_DOWN):
        message = ""  # the catalogue's, which has the remedy
    elif reason in _QUEUED and retry_after_ms is None:
        retry_after_ms = DONT_RETRY
    elif reason is Reason.QUEUE_FULL:
        message += "; try again"
    return ServiceError(reason, message, retry_after_ms=retry_after_ms)


def from_exception(error: BaseException) -> ServiceError | None:
    """The catalogue's error for an exception; None for one that is a bug of our own, whose text no caller may see."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, Refused):
        return from_refusal(error)
    return None


def code_of(error: BaseException) -> grpc.StatusCode:
    """The code that a call ends with which raised ``error``."""
    if isinstance(error, StatusError):
        return status_code(error.status)
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    known = from_exception(error)
    return grpc.StatusCode.INTERNAL if known is None else known.code


def to_status(error: ServiceError, request_id: str) -> status_pb2.Status:
    """The error as the wire has it, in at most MAX_STATUS_BYTES."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    if error.reason in (Reason.INTERNAL, Reason.KILLED_WORKER):
        message += f" {request_id}"  # many tools show the details as base64
    details = [
        _pack(error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN)),
        _pack(error_details_pb2.RequestInfo(request_id=request_id)),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, _MAX_FIELD_BYTES), description=message
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms is not None and error.retry_after_ms >= 0:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=message, details=details)
    assert status.ByteSize() <= MAX_STATUS_BYTES, "the caps on message and field keep a status small"
    return status


def ending_status(reason: EngineFinishReason, message: str, request_id: str) -> status_pb2.Status:
    """The status of a request that ended for ``reason``: OK where it ended as it should."""
    named = _ENDINGS[reason]
    if named is None:
        return status_pb2.Status()
    # What is said of a crash or a bug is for the log; the caller gets the request id to find it there.
    is_ours = named in (Reason.INTERNAL, Reason.WORKER_DIED, Reason.KILLED_WORKER)
    return to_status(ServiceError(named, "" if is_ours else message), request_id)


def with_finished(status: status_pb2.Status, finished: Message) -> status_pb2.Status:
    """``status`` with the request's end among its details, for a call that can say it nowhere else. ``finished``: a
    penstock.v1.Finished."""
    end = type(finished)()
    end.CopyFrom(finished)
    end.ClearField("status")  # it is what carries this
    return status_pb2.Status(code=status.code, message=status.message, details=[*status.details, _pack(end)])


def status_code(status: status_pb2.Status) -> grpc.StatusCode:
    """gRPC's own code of a status."""
    return _CODES[status.code]


def trailers(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a call that ends with ``status``: its details, and the pushback for clients that
    retry."""
    trailing: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    pushback = _pushback_ms(status)
    if pushback is not None:
        trailing.append(("grpc-retry-pushback-ms", str(pushback)))
    return tuple(trailing)


_RETRIED = frozenset({_Code.RESOURCE_EXHAUSTED, _Code.UNAVAILABLE})
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _pushback_ms(status: status_pb2.Status) -> int | None:
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return retry.retry_delay.ToMilliseconds()
    # Clients that retry do it for these codes; a status that says no time is for them to leave alone.
    return DONT_RETRY if status_code(status) in _RETRIED else None


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode(errors="ignore") + "..."
