"""Failures of the service become HTTP errors: the status, the body, the field and the headers for a retry."""

import json

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from penstock.clients.errors import RequestFailed, StreamBroken, Unreachable, failure_from_status
from penstock.clients.gateway.errors import as_gateway_error, from_failure
from penstock.service.errors import Reason, ServiceError


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.FAILED_PRECONDITION, 400),
        (grpc.StatusCode.OUT_OF_RANGE, 400),
        (grpc.StatusCode.UNAUTHENTICATED, 401),
        (grpc.StatusCode.PERMISSION_DENIED, 403),
        (grpc.StatusCode.NOT_FOUND, 404),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
        (grpc.StatusCode.CANCELLED, 499),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.UNKNOWN, 500),
        (grpc.StatusCode.UNIMPLEMENTED, 501),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    ],
)
def test_every_status_has_its_code(code, status):
    info = AnyMessage()
    info.Pack(ErrorInfo(reason="SOME_REASON"))
    failure = failure_from_status(Status(code=code.value[0], message="as you wish", details=[info]))
    error = from_failure(failure)
    assert error.status == status
    assert error.body()["error"]["code"] == "some_reason"
    assert error.message == "as you wish"


def test_details_become_the_field_and_the_headers():
    violation = BadRequest.FieldViolation(field="sampling.max_tokens", description="too many")
    details = []
    for message in (BadRequest(field_violations=[violation]), RetryInfo(retry_delay=Duration(nanos=250_000_000))):
        details.append(AnyMessage())
        details[-1].Pack(message)
    status = Status(code=8, message="sampling.max_tokens: too many", details=details)
    error = from_failure(failure_from_status(status, "R" * 26), lambda field: "max_completion_tokens")
    assert error.param == "max_completion_tokens"
    assert error.message == "max_completion_tokens: too many"
    assert error.headers() == {
        "retry-after": "1",
        "retry-after-ms": "250",
        "x-should-retry": "true",
        "x-request-id": "R" * 26,
    }


def test_final_failures_forbid_retries():
    failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, "gone for good")
    failure.is_final = True
    headers = from_failure(failure).headers()
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers


def test_a_stream_that_broke_may_be_tried_again_whatever_grpc_calls_it():
    failures = [
        StreamBroken(code, "reset")
        for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)
    ]
    slow = StreamBroken(grpc.StatusCode.RESOURCE_EXHAUSTED, "read it")  # the gateway's fault, not its caller's
    slow.reason, slow.is_final = "READER_TOO_SLOW", True
    for failure in (*failures, slow):
        error = from_failure(failure)
        assert (error.status, error.code) == (503, "service_unavailable")
        assert error.headers()["x-should-retry"] == "true"
        assert error.headers()["retry-after"] == "1"


def test_grpcs_own_words_stay_inside():
    secret = "ipv4:10.0.0.7:50051: connection reset"
    for failure in (
        Unreachable(grpc.StatusCode.UNAVAILABLE, secret),
        StreamBroken(grpc.StatusCode.UNAVAILABLE, secret),
        RequestFailed(grpc.StatusCode.INTERNAL, secret),
        ValueError(secret),
    ):
        error = as_gateway_error(failure)
        assert "10.0.0.7" not in json.dumps(error.body())
        assert error.status in (500, 503)


def test_a_missing_key_is_reported_in_http_terms():
    message = str(ServiceError(Reason.UNAUTHENTICATED))
    error = from_failure(RequestFailed(grpc.StatusCode.UNAUTHENTICATED, message))
    assert error.message == "no valid API key or token; send the header 'Authorization: Bearer KEY'"
    assert error.headers()["www-authenticate"] == "Bearer"
