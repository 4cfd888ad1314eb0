"""What the service, or gRPC, says becomes an exception with all that a caller can use."""

import copy

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc.aio import AioRpcError, Metadata

import penstock.v1 as pb
from penstock.clients import RequestFailed, StreamBroken, Unreachable
from penstock.clients.errors import failure_from_call, failure_from_status


def packed(*messages):
    details = [Any() for _ in messages]
    for detail, message in zip(details, messages, strict=True):
        detail.Pack(message)
    return details


STATUS = Status(
    code=8,
    message="the queue is full",
    details=packed(
        ErrorInfo(reason="QUEUE_FULL"),
        RequestInfo(request_id="R1"),
        RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
        BadRequest(field_violations=[BadRequest.FieldViolation(field="n", description="too many")]),
    ),
)


def call_error(code, details, **trailing):
    metadata = Metadata(*((name.replace("_", "-"), value) for name, value in trailing.items()))
    return AioRpcError(code, Metadata(), metadata, details=details)


def check(failure):
    assert (failure.code, failure.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert (failure.reason, failure.request_id, failure.retry_after) == ("QUEUE_FULL", "R1", 1.5)
    assert failure.violations == [("n", "too many")]
    assert failure.retryable


def test_in_band():
    check(failure_from_status(STATUS))


def test_in_trailing_metadata():
    error = call_error(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", grpc_status_details_bin=STATUS.SerializeToString()
    )
    failure = failure_from_call(error, "t", StreamBroken)
    assert type(failure) is StreamBroken
    check(failure)


@pytest.mark.parametrize(
    ("pushback", "retryable", "after"), [("250", True, 0.25), ("-1", False, None), ("soon", True, None)]
)
def test_pushback(pushback, retryable, after):
    error = call_error(grpc.StatusCode.UNAVAILABLE, "draining", grpc_retry_pushback_ms=pushback)
    failure = failure_from_call(error, "t")
    assert (failure.retryable, failure.retry_after) == (retryable, after)


@pytest.mark.parametrize(("retry_after", "retryable"), [(5, True), (0, True), (None, False)])
def test_resource_exhausted_is_retryable_only_with_a_retry_delay(retry_after, retryable):
    """A prompt that is larger than the whole queue is refused with the code of a queue that is full."""
    status = Status(code=8, message="too large", details=packed(ErrorInfo(reason="QUEUE_FULL")))
    if retry_after is not None:
        status.details.extend(packed(RetryInfo(retry_delay=Duration(seconds=retry_after))))
    assert failure_from_status(status).retryable is retryable
    trailing = {"grpc_status_details_bin": status.SerializeToString()}
    error = call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", **trailing)
    assert failure_from_call(error, "t").retryable is retryable


@pytest.mark.parametrize(
    ("reason", "value", "retryable"),
    [
        ("READER_TOO_SLOW", pb.ERROR_REASON_READER_TOO_SLOW, False),
        ("QUEUE_FULL", pb.ERROR_REASON_QUEUE_FULL, True),
        ("SHUTDOWN", pb.ERROR_REASON_SHUTDOWN, True),
        ("OF_A_NEWER_SERVICE", pb.ERROR_REASON_UNSPECIFIED, True),
        ("", pb.ERROR_REASON_UNSPECIFIED, True),
    ],
)
def test_the_reason_decides_whether_another_try_can_help(reason, value, retryable):
    """A code has failures that can be retried and others that cannot."""
    details = packed(ErrorInfo(reason=reason), RetryInfo(retry_delay=Duration(seconds=1)))
    for code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
        failure = failure_from_status(Status(code=code.value[0], details=details))
        assert (failure.error_reason, failure.retryable) == (value, retryable)


def test_garbage_in_the_details_hides_nothing():
    error = call_error(grpc.StatusCode.UNAVAILABLE, "draining", grpc_status_details_bin=b"\xff\xff")
    assert failure_from_call(error, "t").message == "draining"


@pytest.mark.parametrize(
    ("details", "says"),
    [
        (
            "failed to connect to all addresses; last error: t: Failed to connect to remote host: refused (111)",
            "no service answers at t:1: refused (111)",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Ssl handshake failed",
            "no service answers at t:1: UNKNOWN: ipv4:127.0.0.1:1: Ssl handshake failed",
        ),
        (
            "errors resolving no:1: [field:hostname lookup error:address lookup failed: Domain name not found]",
            "no service answers at t:1: the host is unknown",
        ),
        (
            "failed to connect to all addresses; last error: Tls handshake failed: SSL routines:WRONG_VERSION_NUMBER",
            "no service answers at t:1: the server there does not use TLS",
        ),
        ("DNS resolution failed for nowhere:1", "no service answers at t:1: DNS resolution failed for nowhere:1"),
    ],
)
def test_no_connection_is_unreachable(details, says):
    failure = failure_from_call(call_error(grpc.StatusCode.UNAVAILABLE, details), "t:1", StreamBroken)
    assert type(failure) is Unreachable
    assert str(failure) == says


def test_a_code_of_the_future_is_unknown():
    assert failure_from_status(Status(code=99, message="?")).code is grpc.StatusCode.UNKNOWN


def test_a_copy_is_whole():
    failure = copy.copy(failure_from_status(STATUS))
    assert type(failure) is RequestFailed
    check(failure)


@pytest.mark.parametrize(
    ("target", "details", "says"),
    [
        (
            "http://t:1",
            "errors resolving http://t:1: [field:address lookup failed for http://t:1: Misformatted domain name]",
            "no service answers at http://t:1: write the address as HOST:PORT, without a scheme",
        ),
        (
            "t",
            "failed to connect to all addresses; last error: UNKNOWN: Failed to connect to remote host: refused",
            "no service answers at t: refused; without a port gRPC takes 443: write HOST:PORT",
        ),
        (
            "unix:/t",
            "failed to connect to all addresses; connect failed: addr: unix:/t error: No such file or directory",
            "no service answers at unix:/t: No such file or directory",
        ),
    ],
)
def test_an_address_that_is_written_wrong(target, details, says):
    assert str(failure_from_call(call_error(grpc.StatusCode.UNAVAILABLE, details), target)) == says
