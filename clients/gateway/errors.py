"""Errors as callers see them: in the format of OpenAI's API or of Anthropic's; the HTTP code, and when to retry.

Messages come from the service, which writes them for callers, or from this package; never from an exception's text.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import grpc
import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute

import penstock.v1 as pb
from penstock.clients.errors import InvalidOption, RequestFailed, StreamBroken, Unreachable
from penstock.clients.gateway.field_names import caller_name
from penstock.clients.gateway.paths import allowed_methods, is_anthropics, options_response
from penstock.clients.host.error_frames import release_frames

_Code = grpc.StatusCode
_HTTP_CODES: Mapping[grpc.StatusCode, int] = {
    _Code.INVALID_ARGUMENT: 400,
    _Code.FAILED_PRECONDITION: 400,
    _Code.OUT_OF_RANGE: 400,
    _Code.UNAUTHENTICATED: 401,
    _Code.PERMISSION_DENIED: 403,
    _Code.NOT_FOUND: 404,
    _Code.ALREADY_EXISTS: 409,
    _Code.ABORTED: 409,
    _Code.RESOURCE_EXHAUSTED: 429,
    _Code.CANCELLED: 499,
    _Code.UNIMPLEMENTED: 501,
    _Code.UNAVAILABLE: 503,
    _Code.DEADLINE_EXCEEDED: 504,
}
"""HTTP codes by gRPC code; all others become 500."""
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {"UNAUTHENTICATED": "invalid_api_key", "CONTEXT_LENGTH": "context_length_exceeded"}
"""OpenAI's codes for the service's reasons, where OpenAI has one."""
_GRPC_KEY, _HTTP_KEY = "the metadata 'authorization: Bearer <key>'", "the header 'Authorization: Bearer KEY'"
RETRY_S = 1.0
"""The retry delay for requests that this gateway refused, or that the service refused without a hint."""


class ErrorDetail(BaseModel):
    """The details of an error."""

    message: str = Field(description="A human-readable message.")
    type: str = Field(description="The type of error, such as invalid_request_error.")
    param: str | None = Field(None, description="The invalid field, if the error is about one.")
    code: str | None = Field(None, description="A machine-readable code, such as queue_full.")


class ErrorBody(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """The details of an error in Anthropic's format."""

    type: str = Field(description="The type of error, such as invalid_request_error.")
    message: str = Field(description="A human-readable message, which begins with the invalid field, if there is one.")


class AnthropicErrorBody(BaseModel):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = Field(description="The service's id of the request, if it reached the service.")


@dataclass(eq=False)
class GatewayError(Exception):
    """An error for the caller; ``message`` is sent unchanged."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    may_retry: bool | None = None
    """Whether the same request may succeed later; None: depends on the HTTP code."""
    request_id: str = ""

    @property
    def type(self) -> str:
        """OpenAI's type of the error, by its HTTP code."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def with_param(self, renamed: Callable[[str], str]) -> "GatewayError":
        """Returns this error with the caller's name of the field."""
        if self.param is not None and (name := renamed(self.param)) != self.param:
            self.message = name + self.message.removeprefix(self.param)
            self.param = name
        return self

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Returns the error in the format of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": self.message}
        return {"type": "error", "error": error, "request_id": self.request_id or None}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            # The standard has seconds; OpenAI's clients look for milliseconds first.
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(round(self.retry_after_s * 1000))
        if self.may_retry is not None:
            headers["x-should-retry"] = "true" if self.may_retry else "false"
        if self.request_id:
            headers["x-request-id"] = self.request_id
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 408:
            headers["connection"] = "close"  # the rest of the body would count as time of the next request
        return headers

    def response(self, path: str) -> Response:
        """Returns the response to a request, whose path determines the format."""
        return Response(self._encoded(path), self.status, self.headers(), "application/json")

    def last_event(self, path: str) -> bytes:
        """Returns the last event of a stream that breaks off, in the format of its path."""
        name = b"event: error\n" if is_anthropics(path) else b""
        return b"%bdata: %b\n\n" % (name, self._encoded(path))

    def _encoded(self, path: str) -> bytes:
        return msgspec.json.encode(self.anthropic_body() if is_anthropics(path) else self.body())


class ResponseCut(Exception):
    """Ends a response that has begun: the connection is closed, so the caller notices that it is incomplete."""


def invalid(param: str, problem: str, *, code: str | None = None) -> GatewayError:
    """Returns the error of an invalid field: ``problem`` describes a valid value."""
    return GatewayError(400, f"{param}: {problem}", param=param, code=code)


def try_again(status: int, message: str, *, code: str, retry_after_s: float = RETRY_S) -> GatewayError:
    """Returns the error of a request that may succeed later."""
    return GatewayError(status, message, code=code, retry_after_s=retry_after_s, may_retry=True)


def from_failure(failure: RequestFailed, renamed: Callable[[str], str] = caller_name) -> GatewayError:
    """Converts a failure of the service or the connection. ``renamed`` converts the contract's path of a field to the
    caller's."""
    if isinstance(failure, Unreachable):
        down = "the gateway cannot reach the service, which may be starting, restarting or stopped; try again"
        return try_again(503, down, code="service_unavailable")
    status = _HTTP_CODES.get(failure.code, 500)
    message, param = failure.message, None
    if failure.violations:
        field = failure.violations[0][0]
        param = renamed(field)
        message = param + message.removeprefix(field) if message.startswith(f"{field}:") else message
    if status == 401:
        message = message.replace(_GRPC_KEY, _HTTP_KEY)
    code = _NAMES.get(failure.reason, failure.reason.lower()) or None
    is_slow = failure.error_reason == pb.ERROR_REASON_READER_TOO_SLOW  # of this gateway, not of its callers
    is_final = failure.is_final and not is_slow
    is_broken = is_slow or (not failure.reason and (isinstance(failure, StreamBroken) or status >= 500))
    if is_broken:
        message = "the connection to the service broke before the response was complete; try again"
        code = "service_unavailable"  # gRPC's message is only for logs
        status = status if status in (501, 504) else 503
    retry_after = failure.retry_after
    if status == 503 and retry_after is None and not is_final:
        retry_after = RETRY_S
    may_retry = failure.retryable if status in (429, 503) else False if status >= 500 else None
    if is_broken and status == 503:
        may_retry = not is_final  # whichever code gRPC reports
    return GatewayError(
        status,
        message,
        param=param,
        code=code,
        retry_after_s=None if is_final else retry_after,
        may_retry=may_retry,
        request_id=failure.request_id,
    )


@contextmanager
def renaming(renamed: Callable[[str], str]) -> Iterator[None]:
    """Converts failures of the service in its block. ``renamed``: see ``from_failure``."""
    try:
        yield
    except RequestFailed as failure:
        raise from_failure(failure, renamed) from None


def as_gateway_error(error: Exception, renamed: Callable[[str], str] = caller_name) -> GatewayError:
    """Converts any exception to an error for callers."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, RequestFailed):
        return from_failure(error, renamed)
    if isinstance(error, InvalidOption):
        return invalid(renamed(error.field), error.problem)
    if isinstance(error, PydanticSerializationError):  # this is the only content of a body that it refuses
        return GatewayError(400, "the body is nested too deeply", code="nested_too_deeply")
    return GatewayError(
        500,
        "an internal error of the gateway; report it to its operator with the request id",
        code="internal",
        may_retry=False,
    )


def install_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Installs handlers that return every known error in the format of its path. ``routes`` are all routes."""

    async def ours(request: Request, error: Exception) -> Response:
        release_frames(error)
        return as_gateway_error(error).response(request.scope["path"])

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        for each in error.errors():
            if isinstance(raised := each.get("ctx", {}).get("error"), Exception):  # raised by a schema's validator
                release_frames(raised)
        release_frames(error)
        return from_validation(error.errors()).response(request.scope["path"])

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        if request.method == "OPTIONS" and path == "*":  # the server as a whole
            return options_response(["GET", "HEAD", "OPTIONS", "POST"])
        if error.status_code != 405:
            no_path = "no such path; OpenAI's API is under /v1, and /docs lists all paths"
            message = no_path if error.status_code == 404 else str(error.detail)
            return GatewayError(error.status_code, message).response(path)
        methods = allowed_methods(routes, path)
        if request.method == "OPTIONS":
            return options_response(methods)
        listed = ", ".join(methods)
        refusal = GatewayError(405, f"{path} does not support {request.method}; use one of {listed}")
        response = refusal.response(path)
        response.headers["allow"] = listed
        return response

    for kind in (GatewayError, RequestFailed, InvalidOption, PydanticSerializationError):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)


def from_validation(errors: Sequence[Any]) -> GatewayError:
    """Returns the first error of a body. In a union, the error of the member that matched furthest counts."""
    first = max(errors, key=_depth)
    param = _path(first["loc"])
    is_empty = first["type"] in ("too_short", "string_too_short") and first["ctx"]["min_length"] == 1
    problem = "must not be empty" if is_empty else str(first["msg"]).removeprefix("Value error, ")
    return invalid(param, problem) if param else GatewayError(400, problem)


def _depth(error: Any) -> tuple[int, int]:
    location = error["loc"]
    last = location[-1] if location else 0
    return len(location), last if isinstance(last, int) else 0


def _path(location: Sequence[str | int]) -> str:
    """Formats a path in a body as a caller would write it: messages[0].content. Leaves out the names of a union's
    members, which are not fields."""
    path = ""
    for part in location[1:] if location and location[0] == "body" else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})
