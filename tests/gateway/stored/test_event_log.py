"""The log of a response's events: read from any of them, live and from its encoded form."""

import pytest

from penstock.clients.gateway.stored.event_log import EventLog

EVENTS = [b"event: e\ndata: {%d, %b}\n\n" % (number, b"x" * (number % 500)) for number in range(1000)]
"""Some blocks, and a rest."""


def read_from(log, first):
    """All events from number ``first`` on."""
    data = b""
    while first < len(log):
        more, after = log.read(first)
        assert after > first
        data, first = data + more, after
    assert log.read(first) == (b"", first)
    return data


@pytest.fixture(scope="module")
def log():
    log = EventLog()
    for event in EVENTS:
        log.append(event)
    return log


@pytest.mark.parametrize("first", [0, 1, 250, 251, 500, 998, 999, 1000, 5000])
def test_events_are_read_from_any_of_them(log, first):
    expected = b"".join(EVENTS[first:])
    assert read_from(log, first) == expected
    assert read_from(EventLog.decoded(log.encoded()), first) == expected


def test_every_event_is_a_place_to_begin(log):
    for first, event in enumerate(EVENTS):
        assert log.read(first)[0].startswith(event)


def test_events_may_be_encoded_before_they_are_added(log):
    more = [b"data: one\n\n", b"data: two\n\n"]
    assert read_from(EventLog.decoded(log.encoded(more)), 0) == b"".join(EVENTS + more)
    assert len(log) == len(EVENTS)
    assert read_from(EventLog.decoded(EventLog().encoded(more)), 1) == more[1]
    assert len(EventLog.decoded(EventLog().encoded())) == 0


def test_it_is_much_smaller_than_its_events(log):
    assert len(log.encoded()) < sum(map(len, EVENTS)) / 10
