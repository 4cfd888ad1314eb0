"""``penstock serve`` as a child process: it serves, reports why it cannot, and ends with its parent."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import wait_until

from penstock.clients import AsyncClient
from penstock.clients.ray.serve_process import ServeFailed, ServeProcess

FLAGS = ["--model=demo", "--max-model-len=256", "--kv-cache-memory-bytes=64M"]
PARENT = """
import asyncio, sys
from penstock.clients.ray.serve_process import ServeProcess
process = ServeProcess(sys.argv[1:])
asyncio.run(process.addresses())
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


async def test_it_serves_on_free_ports_and_ends_at_sigterm(capfd: pytest.CaptureFixture[str]) -> None:
    process = ServeProcess(FLAGS)
    addresses = await process.addresses()
    assert addresses.http.startswith("http://127.0.0.1:")
    async with AsyncClient(addresses.target) as client:
        await client.wait_ready()
        assert (await client.model()).max_model_len == 256
    family_of_child = family(process._process.pid)
    assert len(family_of_child) >= 3, "the service, its worker and its gateway"
    await asyncio.to_thread(process.stop, 120.0)
    assert await process.wait() == "status 0"
    wait_until(lambda: all(map(has_ended, family_of_child)))
    assert f"serves demo on {addresses.target}" in capfd.readouterr().err, "the log has the greeting"


@pytest.mark.parametrize(
    ("flags", "status", "problem"),
    [
        (["--model=/nowhere"], 1, "/nowhere: no such directory"),
        (["--max-num-seq=4"], 2, "--max-num-seqs"),
    ],
)
async def test_an_error_has_the_end_of_the_log(flags: list[str], status: int, problem: str) -> None:
    with pytest.raises(ServeFailed, match=f"ended with status {status} before it served:\n[^$]*{problem}"):
        await ServeProcess(flags).addresses()


def test_it_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, *FLAGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        processes = family(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(has_ended, processes)))
