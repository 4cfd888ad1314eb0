"""How often one message is logged."""

import logging

import pytest

from penstock.clients.host.log_rate import BURST, LOG_KIND, PERIOD_S, LogRate


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("penstock.clients.host.log_rate.time.monotonic", lambda: now[0])
    return now


def record(line):
    return logging.LogRecord("uvicorn.error", logging.WARNING, "file.py", line, "bad bytes", (), None)


def test_repeated_messages_are_limited_and_the_suppressed_ones_counted(clock):
    rate = LogRate()
    assert sum(rate.filter(record(1)) for _ in range(100)) == BURST
    assert rate.filter(record(2))  # another message
    clock[0] = PERIOD_S + 1
    later = record(1)
    assert rate.filter(later)
    assert later.getMessage() == f"bad bytes (and {100 - BURST} more like this in the last 61 s)"
    last = record(1)
    assert rate.filter(last)
    assert last.getMessage() == "bad bytes"


def kind_of(kind):
    made = record(1)
    setattr(made, LOG_KIND, kind)
    return made


def raised(error):
    made = record(1)
    made.exc_info = (type(error), error, None)
    return made


@pytest.mark.parametrize(
    ("one", "another"),
    [(lambda: kind_of("a"), lambda: kind_of("b")), (lambda: raised(KeyError()), lambda: raised(OSError()))],
)
def test_many_of_one_kind_hide_no_other_kind(clock, one, another):
    rate = LogRate()
    assert sum(rate.filter(one()) for _ in range(100)) == BURST
    assert rate.filter(another())
