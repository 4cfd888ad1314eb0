"""The catalogue: small statuses with rich details, and nothing of ours in them."""

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused
from penstock.service.errors import (
    MAX_STATUS_BYTES,
    Reason,
    ServiceError,
    ending_status,
    from_exception,
    invalid,
    status_code,
    to_status,
    trailers,
)

REQUEST_ID = "0" * 26


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_in_the_catalogue(reason, details_of):
    status = to_status(ServiceError(reason), REQUEST_ID)
    assert status_code(status) not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)
    assert status.message
    details = details_of(status)
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == (reason.name, "penstock.dev")
    assert details["RequestInfo"].request_id == REQUEST_ID


def test_the_contract_has_the_same_reasons_and_their_rules():
    values = pb.ErrorReason.DESCRIPTOR.values
    assert [value.name for value in values[1:]] == [f"ERROR_REASON_{reason.name}" for reason in Reason]
    for reason in Reason:
        is_retried = reason.retry_rule in (pb.RETRY_RULE_AFTER_DELAY, pb.RETRY_RULE_OTHER_REPLICA)
        assert is_retried or reason.retry_rule == pb.RETRY_RULE_NEVER
        assert (reason.retry_after_ms is not None) == is_retried, "the delay goes with the rule"
        # gRPC's clients retry these codes alone
        assert not is_retried or reason.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("text", ["x" * 100_000, "ü" * 100_000, "\U0001f600" * 100_000, "\ud800" * 5000])
def test_a_status_stays_small_for_any_text(text, details_of):
    status = to_status(invalid(text, text), REQUEST_ID)
    assert status.ByteSize() <= MAX_STATUS_BYTES
    assert details_of(status)["RequestInfo"].request_id == REQUEST_ID


def test_field_is_named_with_the_remedy(details_of):
    status = to_status(invalid("sampling.top_p", "must be at most 1"), REQUEST_ID)
    assert status_code(status) is grpc.StatusCode.INVALID_ARGUMENT
    [violation] = details_of(status)["BadRequest"].field_violations
    assert violation.field == "sampling.top_p"
    assert "at most 1" in violation.description


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (ServiceError(Reason.QUEUE_FULL), "1000"),
        (ServiceError(Reason.QUEUE_FULL, retry_after_ms=70), "70"),
        (ServiceError(Reason.READER_TOO_SLOW), "-1"),
        (ServiceError(Reason.INVALID_FIELD), None),
    ],
)
def test_pushback_gives_the_retry_delay(error, pushback, details_of):
    status = to_status(error, REQUEST_ID)
    assert dict(trailers(status)).get("grpc-retry-pushback-ms") == pushback
    delay = details_of(status).get("RetryInfo")
    assert (None if delay is None else str(delay.retry_delay.ToMilliseconds())) == (
        pushback if pushback != "-1" else None
    )


@pytest.mark.parametrize("kind", RefusalKind)
def test_every_refusal_of_the_engine_is_known(kind):
    known = from_exception(Refused(kind, "why", retry_after_ms=5))
    assert known is not None
    assert known.retry_after_ms == 5
    remedies = {RefusalKind.DRAINING: "try another", RefusalKind.WORKER_DOWN: "try again"}
    if kind in remedies:
        assert known.message == known.reason.message
        assert known.message.endswith(remedies[kind])
    else:
        assert known.message == ("why; try again" if kind is RefusalKind.QUEUE_FULL else "why")


def test_a_full_queue_that_never_empties_enough_is_not_tried_again():
    known = from_exception(Refused(RefusalKind.QUEUE_FULL, "too many tokens for any queue"))
    assert known is not None
    assert known.message == "too many tokens for any queue"
    assert dict(trailers(to_status(known, REQUEST_ID)))["grpc-retry-pushback-ms"] == "-1"


@pytest.mark.parametrize("reason", EngineFinishReason)
def test_every_end_has_a_status(reason):
    status = ending_status(reason, "secret of the worker", REQUEST_ID)
    is_fine = reason in (EngineFinishReason.STOP, EngineFinishReason.LENGTH)
    assert (status.code == 0) == is_fine
    if reason in (EngineFinishReason.INTERNAL, EngineFinishReason.WORKER_DIED, EngineFinishReason.KILLED_WORKER):
        assert "secret" not in status.message


def test_what_is_reported_to_the_operator_has_its_id_in_the_message():
    """Tools such as buf show the details as base64."""
    assert to_status(ServiceError(Reason.INTERNAL), REQUEST_ID).message.endswith(f"the request id {REQUEST_ID}")
    assert ending_status(EngineFinishReason.INTERNAL, "", REQUEST_ID).message.endswith(REQUEST_ID)


def test_a_bug_of_ours_is_not_in_the_catalogue():
    assert from_exception(RuntimeError("secret")) is None
    assert from_exception(TimeoutError("secret")) is None
