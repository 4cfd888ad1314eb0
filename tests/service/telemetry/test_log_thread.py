"""A log that nobody reads holds nobody up, and says later what was lost."""

import re
import subprocess
import sys

LOG_MUCH = """
import logging, sys
from penstock.models.executor.log_format import set_up_logging
from penstock.clients.host.log_thread import LogThread
set_up_logging("text", "info", holds_texts=True, handler=LogThread())
for number in range(10_000):
    logging.info("line %d %s", number, "x" * 100)
print("done", flush=True)
sys.stdin.readline()
"""
LINE = re.compile(r"^\S+ \S+ INFO root: line (\d+) x{100}$", re.MULTILINE)
_LOGGER = "penstock.clients.host.log_thread"
DROPPED = re.compile(rf"^\S+ \S+ WARNING {_LOGGER}: (\d+) lines of the log were dropped", re.MULTILINE)


def logging_much():
    """Whoever starts it reads none of its log as yet."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", LOG_MUCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_logging_never_blocks_and_dropped_lines_are_counted():
    with logging_much() as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "done\n", "it waits for a reader of its log"
            _, log = process.communicate("\n", timeout=120)
        finally:
            process.kill()
    written = [int(number) for number in LINE.findall(log)]
    assert written == sorted(set(written))
    dropped = [int(number) for number in DROPPED.findall(log)]
    assert dropped
    assert len(written) + sum(dropped) == 10_000


def test_a_process_with_an_unread_log_can_exit():
    with logging_much() as process:
        try:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(timeout=120) == 0
        finally:
            process.kill()
