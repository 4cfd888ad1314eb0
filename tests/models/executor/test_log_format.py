"""Lines of the log, for people and for programs, and what they do not repeat."""

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading

import pytest

from penstock.models.executor.log_format import JsonFormatter, TextFormatter, log_uncaught

SECRET = "a prompt that nobody else may read"


def record(error=None, **extra):
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("penstock.x", logging.ERROR, "x.py", 1, "request %s: %d", ("id", 3), info)
    made.__dict__.update(extra)
    return made


def raised(error, cause=None):
    """As it is when it was caught."""
    try:
        try:
            if cause is not None:
                raise cause
        except Exception as before:
            raise error from before
        raise error
    except Exception as caught:
        return caught


def test_a_line_of_json():
    line = JsonFormatter(holds_texts=True).format(record(data={"request_id": "id", "odd": {1}}))
    told = json.loads(line)
    assert "\n" not in line
    assert (told["level"], told["logger"], told["message"]) == ("ERROR", "penstock.x", "request id: 3")
    assert (told["request_id"], told["odd"]) == ("id", "{1}")
    assert told["time"].endswith("+00:00")
    assert "exception" not in told


def test_a_line_of_text():
    line = TextFormatter(holds_texts=True).format(record())
    assert line.endswith("ERROR penstock.x: request id: 3")


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_an_exception_is_logged_without_its_text(formatter):
    error = raised(RuntimeError(SECRET), cause=ValueError(f"bad: {SECRET}"))
    error.add_note(SECRET)
    made = record(error)
    logging.Formatter().format(made)  # another handler has told it in full
    told = formatter(holds_texts=True).format(made)
    assert SECRET not in told
    assert "RuntimeError" in told
    assert "ValueError" in told
    assert "test_log_format.py" in told
    assert "in raised" in told
    assert told.index("ValueError") < told.index("RuntimeError")


def test_operating_system_errors_are_logged_with_their_text():
    told = TextFormatter(holds_texts=True).format(record(raised(FileNotFoundError(2, "No such file", "/etc/x"))))
    assert "FileNotFoundError: [Errno 2] No such file: '/etc/x'" in told


def test_a_process_without_texts_logs_errors_in_full():
    told = TextFormatter(holds_texts=False).format(record(raised(RuntimeError("CUDA error: out of memory"))))
    assert "RuntimeError: CUDA error: out of memory" in told


def test_a_chain_that_is_a_circle_ends():
    first, second = raised(RuntimeError()), raised(ValueError())
    first.__cause__, second.__cause__ = second, first
    assert "RuntimeError" in TextFormatter(holds_texts=True).format(record(first))


@pytest.fixture
def said(caplog):
    """What would be on stderr, as the service formats it."""

    def said():
        formatter = TextFormatter(holds_texts=True)
        return "\n".join(map(formatter.format, caplog.records))

    return said


class Unwilling:
    """Fails when it is collected."""

    def __init__(self, text):
        self.text = text

    def __del__(self):
        raise RuntimeError(self.text)


async def test_uncaught_exceptions_are_logged_without_their_text(said, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", None)
    monkeypatch.setattr(sys, "unraisablehook", None)
    loop = asyncio.get_running_loop()
    log_uncaught(loop)

    def fail(text):
        raise RuntimeError(text)

    loop.call_soon(fail, SECRET)
    await asyncio.sleep(0)
    task = asyncio.create_task(asyncio.to_thread(fail, SECRET))
    await asyncio.wait([task])
    del task
    gc.collect()
    thread = threading.Thread(target=fail, args=(SECRET,))
    thread.start()
    thread.join()
    Unwilling(SECRET)
    told = said()
    for beginning in (
        "Exception in callback",
        "Task exception was never retrieved",
        "a thread",
        "an exception could not be raised",
    ):
        assert beginning in told
    assert told.splitlines().count("RuntimeError") == 4
    assert SECRET not in told


def test_the_log_is_set_up_once():
    code = (
        "import logging\n"
        "from penstock.models.executor.log_format import set_up_logging\n"
        "set_up_logging('json', 'info', holds_texts=True)\n"
        "logging.getLogger('x').info('one')\n"
        "logging.getLogger('x').debug('two')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["one"]


FAILING_WORKER = """
import socket
from penstock.models.worker import main as worker
from penstock.models.executor.wire import Channel, FrameKind
from penstock.scheduler.worker_config import WorkerConfig

def fail(config):
    raise RuntimeError("CUDA error: no device")

worker.load_backend = fail
ours, theirs = socket.socketpair()
Channel(ours).send(FrameKind.CONFIG, WorkerConfig("nowhere", log_format="json"))
raise SystemExit(worker.serve(Channel(theirs)))
"""


def test_a_worker_logs_as_its_service_does():
    command = [sys.executable, "-P", "-c", FAILING_WORKER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    [line] = done.stderr.splitlines()
    told = json.loads(line)
    assert done.returncode == 1
    assert (told["level"], told["message"]) == ("CRITICAL", "the worker failed")
    assert told["exception"].endswith("RuntimeError: CUDA error: no device")
