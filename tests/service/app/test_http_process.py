"""The process behind ``--http-port`` where it cannot be started, or where what keeps it fails."""

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from penstock.service.app import http_process
from penstock.service.app.http_process import HttpFailed, HttpProcess, Patience
from penstock.service.config.addresses import HTTP_FLAG, Address

# It serves nothing, and says that it does.
STAND_IN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if "=" in word)
os.write(int(given["heartbeat-fd"]), b".")
sys.stdin.read()
"""


@pytest.fixture
async def gateway(monkeypatch):
    """It is stopped after the test, whatever has become of it."""
    monkeypatch.setattr(http_process, "_CHILD", STAND_IN)
    gateway = HttpProcess(Address("127.0.0.1", flag=HTTP_FLAG), patience=Patience(first_s=0.01, silent_s=60.0))
    directory = Path(gateway.open().reached_at.removeprefix("unix:")).parent
    yield gateway
    async with asyncio.timeout(120):
        await gateway.stop()
    assert not directory.exists()


@pytest.fixture
def lack_descriptors(monkeypatch):
    """Has so many of the next pipes fail, as they do in a process with too many files."""

    def lack(times):
        left, pipe = iter(range(times)), os.pipe

        def fail():
            if next(left, None) is None:
                return pipe()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "pipe", fail)

    return lack


async def test_one_for_which_there_are_no_descriptors_is_tried_again(gateway, lack_descriptors, caplog):
    await gateway.start()
    first = gateway.pid
    lack_descriptors(2)
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(120):
        while gateway.pid in (None, first):  # noqa: ASYNC110 - a process tells nobody
            await asyncio.sleep(0.01)
    said = "the HTTP gateway cannot be started (Too many open files); restarting it in"
    assert caplog.text.count(said) == 2


async def test_a_start_without_free_descriptors_is_reported(gateway, lack_descriptors):
    lack_descriptors(1)
    with pytest.raises(HttpFailed, match=rf"^{HTTP_FLAG}: the HTTP gateway cannot be started \(Too many open files\)"):
        async with asyncio.timeout(120):
            await gateway.start()


async def test_an_error_of_the_keepers_own_ends_the_start_and_not_the_end(gateway, monkeypatch):
    async def fail(*_):
        raise ValueError("of our own")

    monkeypatch.setattr(HttpProcess, "_run", fail)
    with pytest.raises(ValueError, match="of our own"):
        async with asyncio.timeout(120):
            await gateway.start()
