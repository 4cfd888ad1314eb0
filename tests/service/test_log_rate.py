"""The log is not filled by strangers."""

import logging

from penstock.service import log_rate
from penstock.service.log_rate import BURST, LogRate


def test_a_line_that_comes_too_often_is_left_out_and_counted(caplog, monkeypatch):
    """Others are not."""
    now = 0.0
    monkeypatch.setattr(log_rate.time, "monotonic", lambda: now)
    logger = logging.getLogger("test_log_rate")
    logger.addFilter(LogRate())

    def say() -> None:
        logger.warning("bad bytes of %s", "somebody")

    for _ in range(BURST + 90):
        say()
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["bad bytes of somebody"] * BURST + ["something else"]
    now = log_rate.PERIOD_S + 1
    say()
    assert caplog.records[-1].getMessage() == "bad bytes of somebody (and 90 more like this in the last 61 s)"
    say()
    assert caplog.records[-1].getMessage() == "bad bytes of somebody"
