"""The headers of gateways: their names, bounds and precedence."""

from typing import Any

import pytest

import penstock.v1 as pb
from penstock.clients.host.routing_headers import (
    FAIRNESS_ID,
    OBJECTIVE,
    TPOT_SLO,
    TTFT_SLO,
    RoutingHeaderError,
    RoutingHeaders,
    read_objectives,
)


def start_of(headers, objectives=None, may_act_for_others=True, **fields):
    start = pb.GenerationStart(**fields)
    RoutingHeaders.read(headers).fill(start, objectives or {}, may_act_for_others=may_act_for_others)
    return start


@pytest.mark.parametrize("age", [0, 1])
def test_every_header_sets_its_field_under_both_names(age):
    headers = [
        (FAIRNESS_ID[age], "acme"),
        (OBJECTIVE[age], "-7"),
        (TTFT_SLO[age], "250"),
        (TPOT_SLO[age], "40"),
        ("x-session-id", "talk"),
        ("x-request-id", "mine"),
    ]
    assert start_of(headers) == pb.GenerationStart(
        tenant="acme", priority=-7, ttft_slo_ms=250, tpot_slo_ms=40, session_id="talk", client_request_id="mine"
    )


def test_the_newer_name_counts():
    for names in (FAIRNESS_ID, OBJECTIVE, TTFT_SLO, TPOT_SLO):
        assert start_of([(names[1], "2"), (names[0], "3")]) == start_of([(names[0], "3")])


def test_a_field_in_the_message_wins():
    fields: dict[str, Any] = {"tenant": "t", "priority": 0, "ttft_slo_ms": 9, "tpot_slo_ms": 8, "session_id": "s"}
    headers = [(FAIRNESS_ID[0], "acme"), (OBJECTIVE[0], "7"), (TTFT_SLO[0], "250"), (TPOT_SLO[0], "40")]
    headers += [("x-session-id", "talk"), ("x-request-id", "mine")]
    assert start_of(headers, client_request_id="c", **fields) == pb.GenerationStart(client_request_id="c", **fields)


def test_a_tenant_counts_only_from_those_that_may_act_for_others():
    assert start_of([(FAIRNESS_ID[0], "acme")], may_act_for_others=False) == pb.GenerationStart()
    assert start_of([(FAIRNESS_ID[0], "no tenant!")], may_act_for_others=False) == pb.GenerationStart()
    for name in FAIRNESS_ID:
        with pytest.raises(RoutingHeaderError, match=f"^{name}: must be"):
            start_of([(name, "no tenant!")])


@pytest.mark.parametrize(
    ("objective", "priority"),
    [("batch", 10), ("5", 3), ("6", 6), ("-1000", -1000), ("+2", 2), ("1001", None), ("x", None)],
)
def test_an_objective_is_a_name_of_the_operators_or_a_number(objective, priority):
    start = start_of([(OBJECTIVE[0], objective)], read_objectives('{"batch": 10, "5": 3}'))
    assert (start.priority if start.HasField("priority") else None) == priority


def test_messages_without_a_field_are_left_alone():
    message = pb.EmbedRequest()
    headers = RoutingHeaders.read([(TTFT_SLO[0], "250"), (OBJECTIVE[0], "4"), ("x-session-id", "talk")])
    headers.fill(message, {}, may_act_for_others=True)
    assert message == pb.EmbedRequest(priority=4)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "fast", "86400001", "9" * 40])
def test_a_target_that_is_no_time_is_refused_by_its_name(value):
    with pytest.raises(RoutingHeaderError, match=r"^x-slo-ttft-ms: must be a whole number of milliseconds from 1"):
        RoutingHeaders.read([("x-slo-ttft-ms", value)])


def test_a_header_with_two_values_is_refused():
    with pytest.raises(RoutingHeaderError, match=r"^x-session-id: has several values"):
        RoutingHeaders.read([("x-session-id", "a"), ("x-session-id", "b")])
    assert RoutingHeaders.read([("x-session-id", "a"), ("x-session-id", " a ")]).session_id == "a"
    assert RoutingHeaders.read([("x-request-id", "a"), ("x-request-id", "b")]).request_id == "a"


@pytest.mark.parametrize("value", ["s" * 129, "tür"])
def test_an_id_of_a_session_is_checked_and_that_of_a_proxy_left_out(value):
    with pytest.raises(RoutingHeaderError, match=r"^x-session-id: must be at most 128"):
        RoutingHeaders.read([("x-session-id", value)])
    assert RoutingHeaders.read([("x-request-id", value)]).request_id == ""


def test_empty_and_binary_headers_say_nothing():
    assert RoutingHeaders.read([("x-slo-ttft-ms", " "), ("x-session-id", b"s"), ("x-other", "1")]) == RoutingHeaders()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be an object with a priority for each name"),
        ('{"a": 1001}', "a: the priority must be a whole number from -1,000 to 1,000"),
        ('{"a": "1"}', "it is '1'"),
        ('{"a": true}', "it is True"),
    ],
)
def test_wrong_priorities_of_objectives_are_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        read_objectives(text)
