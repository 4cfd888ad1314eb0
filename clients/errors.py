"""The client's exceptions: mistakes of the caller, and failures of the service or the connection."""

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

import penstock.v1 as pb

if TYPE_CHECKING:
    from penstock.clients.events import Finished

_NO_CONNECTION = re.compile("failed to connect|errors resolving|DNS resolution failed", re.IGNORECASE)
_NO_SOCKET = re.compile(r"connect failed: addr: unix:.* error: (.*)")
_NO_TLS = "the server there does not use TLS"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RULES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: pb.RETRY_RULE_AFTER_DELAY,
    grpc.StatusCode.UNAVAILABLE: pb.RETRY_RULE_OTHER_REPLICA,
}
"""The rules for failures without a known reason; for other codes, never."""


class PenstockError(Exception):
    """The base class of the client's exceptions. Its text is written for users."""


class InvalidOption(PenstockError, ValueError):
    """A request that cannot be sent: ``field`` has the wrong type, is out of range, or does not exist."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def shown(value: object) -> str:
    """Returns a given value as text, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class RequestFailed(PenstockError):
    """A request did not succeed. ``code`` and ``message`` are the service's, or gRPC's if the service never
    responded."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.reason = ""
        """The error's name in the service's catalogue, such as ``QUEUE_FULL``; empty if it gave none."""
        self.violations: list[tuple[str, str]] = []
        """Invalid fields, as (field, description)."""
        self.retry_after: float | None = None
        """How many seconds the service requests to wait before trying again. See ``retryable``."""
        self.request_id = ""
        """The service's id of the request, for logs and support; empty if it never got one."""
        self.finished: Finished | None = None
        """The request's end with its usage and timings, if the service got that far."""
        self.is_final = False
        """Whether the service rules out another try. See ``retryable``."""

    @property
    def error_reason(self) -> "pb.ErrorReason.ValueType":
        """``reason`` as a value of the contract's enum, such as ``pb.ERROR_REASON_QUEUE_FULL``;
        ``pb.ERROR_REASON_UNSPECIFIED`` if the enum has no such value."""
        try:
            return pb.ErrorReason.Value(f"ERROR_REASON_{self.reason}")
        except ValueError:
            return pb.ERROR_REASON_UNSPECIFIED

    @property
    def retry_rule(self) -> "pb.RetryRule.ValueType":
        """Whether the contract allows another try with the same request, and where: the rule of its reason, or, without
        a known reason, the usual one for the code."""
        if (reason := self.error_reason) != pb.ERROR_REASON_UNSPECIFIED:
            value = pb.ErrorReason.DESCRIPTOR.values_by_number[reason]
            return value.GetOptions().Extensions[pb.retry_rule]
        return _RULES.get(self.code, pb.RETRY_RULE_NEVER)

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later, here or at another replica. A request that is too large for this
        service has no ``retry_after``."""
        if self.is_final or self.retry_rule == pb.RETRY_RULE_NEVER:
            return False
        return self.retry_rule == pb.RETRY_RULE_OTHER_REPLICA or self.retry_after is not None

    def __str__(self) -> str:
        named = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.code.name}: {self.message}{named}"


class StreamBroken(RequestFailed):
    """The stream ended before the request did. All requests on it fail with this error; the next request opens a new
    stream."""


class Unreachable(RequestFailed):
    """No service answers at the target."""

    @property
    def speaks_no_tls(self) -> bool:
        """Whether a server listens there, but without transport security."""
        return self.message.endswith(_NO_TLS)

    def __str__(self) -> str:
        return self.message


def failure_from_status(status: Status, request_id: str = "") -> RequestFailed:
    """Returns the failure of one request from its in-band status."""
    error = RequestFailed(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message)
    _read_details(error, status)
    error.request_id = error.request_id or request_id
    return error


def failure_from_call(
    call_error: grpc.aio.AioRpcError, target: str, kind: type[RequestFailed] = RequestFailed
) -> RequestFailed:
    """Returns the failure of a whole call, as ``kind``; ``Unreachable`` if no connection could be made."""
    code = call_error.code()
    details = call_error.details() or "no details"
    if code is grpc.StatusCode.UNAVAILABLE and _NO_CONNECTION.search(details):
        return Unreachable(code, f"no service answers at {target}: {_why(details, target)}")
    error = kind(code, details)
    metadata = dict(call_error.trailing_metadata() or ())
    if isinstance(packed := metadata.get("grpc-status-details-bin"), bytes):
        try:
            _read_details(error, Status.FromString(packed))
        except DecodeError:
            pass  # from a proxy; code and text are still valid
    _read_pushback(error, metadata.get("grpc-retry-pushback-ms", ""))
    return error


def _why(details: str, target: str) -> str:
    """Extracts the reason why there is no connection from gRPC's report of its attempts."""
    if "Misformatted domain name" in details:
        return "write the address as HOST:PORT" + (", without a scheme" if "://" in target else "")
    if missing := _NO_SOCKET.search(details):
        return missing[1]
    if "Domain name not found" in details:
        return "the host is unknown"
    if "WRONG_VERSION_NUMBER" in details:
        return _NO_TLS
    why = details.rpartition("Failed to connect to remote host: ")[2].rpartition("last error: ")[2]
    if re.search(r":\d+$", target) or target.startswith("unix:"):
        return why
    return f"{why}; without a port gRPC takes 443: write HOST:PORT"


def _read_details(error: RequestFailed, status: Status) -> None:
    info, request, bad, retry = ErrorInfo(), RequestInfo(), BadRequest(), RetryInfo()
    for packed in status.details:
        if packed.Unpack(info):
            error.reason = info.reason
        elif packed.Unpack(request):
            error.request_id = request.request_id
        elif packed.Unpack(bad):
            error.violations = [(v.field, v.description) for v in bad.field_violations]
        elif packed.Unpack(retry):
            error.retry_after = retry.retry_delay.ToTimedelta() / timedelta(seconds=1)


def _read_pushback(error: RequestFailed, pushback: str | bytes) -> None:
    """Reads gRPC's pushback, if any: milliseconds, or a negative number for "do not try again"."""
    try:
        milliseconds = int(pushback)
    except ValueError:
        return
    if milliseconds < 0:
        error.is_final = True
    else:
        error.retry_after = milliseconds / 1000
