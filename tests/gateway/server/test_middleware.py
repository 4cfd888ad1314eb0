"""What the outermost layer logs."""

from penstock.clients.gateway.server.middleware import _log_without_text
from penstock.clients.host.log_rate import BURST, LogRate


def fail(error):
    try:
        raise error
    except Exception as raised:
        _log_without_text(raised)


def test_many_errors_of_one_kind_hide_none_of_another(caplog):
    for _ in range(10 * BURST):
        fail(KeyError("what a caller wrote"))
    fail(OSError("what a caller wrote"))
    rate = LogRate()
    logged = [record.getMessage() for record in caplog.records if rate.filter(record)]
    assert len(logged) == BURST + 1
    assert logged[-1].startswith("OSError in the gateway: fail test_middleware.py:")
    assert "what a caller wrote" not in caplog.text
