"""The catalogue of failures of calls and requests, and the google.rpc.Status of each.

Every message comes from this file, or from a named error whose text was written for callers. The text of any other
exception is never sent. Knows neither streams nor the engine's internals.
"""

import asyncio
from collections.abc import Mapping
from enum import Enum, unique

import grpc
from google.protobuf import any as pb_any, duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, Refused

DOMAIN = "penstock.dev"
"""The domain of every ErrorInfo: domain and reason identify the failure for programs."""

MAX_STATUS_BYTES = 1024
_MAX_MESSAGE_BYTES = 300
_MAX_FIELD_BYTES = 80
DONT_RETRY = -1
"""A retry hint: trying again cannot help (a negative pushback, by gRPC's retry design)."""
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


@unique
class Reason(Enum):
    """The default message of each reason of the contract's ErrorReason, and the usual delay until a retry in
    milliseconds where a retry can help. The engine's refusals and finish reasons have the same names."""

    INVALID_FIELD = "a field is out of range"
    CONTEXT_LENGTH = "the request does not fit in the model's context; send or request fewer tokens"
    MALFORMED_MESSAGE = "the message is not a valid protobuf of its type; regenerate the stubs"
    MESSAGE_COUNT = "this method takes exactly one message; send one, then half-close the call"
    METADATA_TOO_LARGE = "a call has at most 16 KiB of metadata; send less"
    MISSING_REF = "ref: is required; choose a number that is not 0"
    DUPLICATE_REF = "the ref is already in use on this stream; choose another"
    UNKNOWN_REF = "no live request of this stream has this ref; it may have ended"
    NOT_OPEN = "the prompt of this request is not open; set start.open to send it in pieces"
    NOT_INJECTABLE = "nothing can be injected into this request; send one choice without a constraint"
    DUPLICATE_REQUEST = (
        "a request with this idempotency_key is live or has ended; read its output, or choose another key"
    )
    OPEN_PROMPTS_FULL = ("the open prompts take too much memory; try again, or send the prompt in one piece", 1000)
    OPEN_PROMPT_EXPIRED = "nothing was appended to the open prompt for too long; append more often, or commit it"
    TOO_LARGE = "the request can never fit in the KV cache; send fewer tokens"
    TOO_EXPENSIVE = "the request needs too much in total"
    NO_CHAT_TEMPLATE = (
        "this model has no chat template; send text or token_ids in place of chat, or serve it with --chat-template"
    )
    NO_TOOLS_IN_TEMPLATE = "this model's chat template does not support tools; omit them, or describe them in a message"
    NO_GENERATION = (
        "this model has a classification head and generates nothing; send texts to be classified, scored or "
        "embedded, or use a service whose model has an output head"
    )
    NO_CLASSIFIER = (
        "this model has no classification head, which classes and scores need; use a service with a "
        "...ForSequenceClassification model, or with --score-tokens"
    )
    SEVERAL_LABELS = "a score needs a classification head with one label; send the texts to be classified instead"
    CHAT_NOT_CONTINUABLE = (
        "this model's chat template does not render answers unchanged, so none can be continued; send the whole "
        "conversation without continue_from, or use text or token_ids with it"
    )
    CONTEXT_NOT_FOUND = "no context of that request is kept, or no longer; send the whole context instead"
    MODEL_NOT_FOUND = "this service serves no model of that name; leave model empty"
    SETTINGS_CHANGED = (
        "the settings have changed since; get them again, and repeat the change with their etag if it is still wanted"
    )
    REQUEST_UNKNOWN = "no request with this id is known"
    UNKNOWN_SERVICE = "no service with this name is served here"
    UNAUTHENTICATED = "no valid API key or token; send the metadata 'authorization: Bearer <key>'"
    METHOD_DENIED = "callers may not use this method"
    TENANT_DENIED = "this caller may not act for another tenant; leave start.tenant empty"
    ADMIN_DENIED = (
        "this caller may not administer the service; add the word 'admin' to its key's line, or the right "
        "'penstock:admin' to its token"
    )
    QUEUE_FULL = ("the queue is full; try again", 1000)
    OVERLOADED = ("the deadline cannot be met; allow more time", 1000)
    TENANT_BUSY = ("the tenant has too many live requests; try again", 1000)
    TENANT_RATE = ("the tenant exceeds its request rate; try again later", 1000)
    TENANT_TOKENS = ("the tenant has used up its tokens for now; try again later", 1000)
    TENANT_CAP = "the request exceeds a limit of its tenant; request less"
    PREPARATION_FULL = ("too many prompts are waiting to be tokenized; try again", 250)
    MESSAGES_IN_FLIGHT = (
        "too many messages were in flight, and this one had taken the longest; try again, or send fewer at once",
        1000,
    )
    READER_TOO_SLOW = "the stream is not read as fast as it fills; read faster, or use more streams"
    NO_GRAMMARS = "output cannot be constrained to a grammar with this model's tokenizer; omit constraint"
    GRAMMAR = "the constraint became too costly to follow; make it simpler"
    DEAD_END = "the constraint allows a beginning of an output that cannot be completed; correct the constraint"
    SLOW_CONSTRAINT = "the constraint takes too long to follow; make it smaller or less ambiguous"
    DEADLINE = "the deadline passed"
    CANCELLED = "cancelled by the client"
    DRAINING = ("the service accepts no new requests; try another", 1000)
    SHUTDOWN = ("the service shut down before the request finished; try another", 1000)
    GOING_DOWN = "the service is shutting down; start another"
    WORKER_DOWN = ("the worker is starting; try another replica, or try again", 5000)
    WORKER_DIED = ("the worker died while the request ran; try again", 5000)
    KILLED_WORKER = (
        "the request crashed the worker twice while it ran alone; do not send it again, and report it to the "
        "service's operator with the request id"
    )
    INTERNAL = "an internal error; report it to the service's operator with the request id"
    SUPERSEDED = "another request of this stream replaced it"
    TICKET_INVALID = "resume_from.ticket: it is damaged; send the ticket exactly as it was received"
    TICKET_MISMATCH = "the ticket in resume_from is for another model or request; send the request without it"
    NOT_RESUMABLE = "a request of this kind cannot be resumed; send it again without resume_from"
    ADAPTER_FAILED = "the LoRA adapter could not be loaded again; ask the operator to unload it and load it again"

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        options = pb.ErrorReason.DESCRIPTOR.values_by_name[f"ERROR_REASON_{self.name}"].GetOptions()
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.code = _CODES[options.Extensions[pb.error_code]]
        self.retry_rule = options.Extensions[pb.retry_rule]


_QUEUED = (Reason.QUEUE_FULL, Reason.OVERLOADED, Reason.TENANT_BUSY)
"""The refusals that other requests' ends resolve. Without a retry time, a retry cannot help."""


class ServiceError(Exception):
    """A failure from the catalogue. ``message`` is sent to the caller unchanged, so it contains no prompts, outputs,
    keys or internals of the service. ``field`` is a path such as ``sampling.top_p``."""

    def __init__(
        self,
        reason: Reason,
        message: str = "",
        *,
        field: str = "",
        retry_after_ms: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """``metadata`` becomes that of the ErrorInfo."""
        self.metadata = metadata
        self.reason = reason
        self.code = reason.code
        self.message = message or reason.message
        self.field = field
        self.retry_after_ms = reason.retry_after_ms if retry_after_ms is None else retry_after_ms
        super().__init__(self.message)


class StatusError(Exception):
    """Ends a call with a given status: that of the only request on the call."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def invalid(field: str, problem: str, reason: Reason = Reason.INVALID_FIELD) -> ServiceError:
    """Returns the error for an invalid field. ``problem`` describes what is wrong and what would be right."""
    return ServiceError(reason, f"{field}: {problem}", field=field)


def from_refusal(refused: Refused) -> ServiceError:
    """Returns the catalogue's error for a refusal by the engine."""
    reason, message, retry_after_ms = Reason[refused.kind.name], refused.message, refused.retry_after_ms
    if reason in (Reason.DRAINING, Reason.WORKER_DOWN):
        message = ""  # the catalogue's message has the remedy
    elif reason in _QUEUED and retry_after_ms is None:
        retry_after_ms = DONT_RETRY
    elif reason is Reason.QUEUE_FULL:
        message += "; try again"
    return ServiceError(reason, message, retry_after_ms=retry_after_ms)


def from_exception(error: BaseException) -> ServiceError | None:
    """Returns the catalogue's error for an exception; None for an internal error, whose text callers must not see."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, Refused):
        return from_refusal(error)
    return None


def code_of(error: BaseException) -> grpc.StatusCode:
    """Returns the code of a call that ends with ``error``."""
    if isinstance(error, StatusError):
        return status_code(error.status)
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    known = from_exception(error)
    return grpc.StatusCode.INTERNAL if known is None else known.code


def to_status(error: ServiceError, request_id: str) -> status_pb2.Status:
    """Returns the error as a google.rpc.Status of at most MAX_STATUS_BYTES."""
    message = _cut(error.message, _MAX_MESSAGE_BYTES)
    if error.reason in (Reason.INTERNAL, Reason.KILLED_WORKER):
        message += f" {request_id}"  # many tools show the details as base64
    details = [
        pb_any.pack(error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=error.metadata)),
        pb_any.pack(error_details_pb2.RequestInfo(request_id=request_id)),
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, _MAX_FIELD_BYTES), description=message
        )
        details.append(pb_any.pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms is not None and error.retry_after_ms >= 0:
        delay = duration.from_milliseconds(error.retry_after_ms)
        details.append(pb_any.pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=message, details=details)
    assert status.ByteSize() <= MAX_STATUS_BYTES, "the caps on message and field keep a status small"
    return status


def ending_status(reason: EngineFinishReason, message: str, request_id: str) -> status_pb2.Status:
    """Returns the status of a request that ended for ``reason``: OK if it succeeded."""
    if reason in (EngineFinishReason.STOP, EngineFinishReason.LENGTH):
        return status_pb2.Status()
    named = Reason[reason.name]
    # The text about a crash, an internal error or a path is only for the log, where the request id finds it.
    is_ours = named in (Reason.INTERNAL, Reason.WORKER_DIED, Reason.KILLED_WORKER, Reason.ADAPTER_FAILED)
    return to_status(ServiceError(named, "" if is_ours else message), request_id)


def with_finished(status: status_pb2.Status, finished: Message) -> status_pb2.Status:
    """Returns ``status`` with the request's end among its details, for a call that has no other place for it.
    ``finished`` is a penstock.v1.Finished."""
    end = type(finished)()
    end.CopyFrom(finished)
    end.ClearField("status")  # the returned status contains the end
    return status_pb2.Status(code=status.code, message=status.message, details=[*status.details, pb_any.pack(end)])


def status_code(status: status_pb2.Status) -> grpc.StatusCode:
    """Returns gRPC's code of a status."""
    return _CODES[status.code]


def trailers(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the trailing metadata of a call that ends with ``status``: its details, and the pushback for clients
    that retry."""
    trailing: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    pushback = _pushback_ms(status)
    if pushback is not None:
        trailing.append(("grpc-retry-pushback-ms", str(pushback)))
    return tuple(trailing)


_RETRIED = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})


def _pushback_ms(status: status_pb2.Status) -> int | None:
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return retry.retry_delay.ToMilliseconds()
    # Clients retry calls that end with these codes; without a retry time they must not.
    return DONT_RETRY if status_code(status) in _RETRIED else None


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= limit:
        return encoded.decode()
    return encoded[: limit - 3].decode(errors="ignore") + "..."
