"""The gateway smg as a process, in front of services with ``--contracts vllm``."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

_PAUSE_S = 0.05


def _free_ports(number: int) -> list[int]:
    """Returns ports that nothing listens on. smg does not report its port, so it cannot choose one itself."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@asynccontextmanager
async def running_smg(folder: Path, *targets: str) -> AsyncIterator[httpx.AsyncClient]:
    """Runs smg in front of these services, once each of them has sent it its load; yields a client of its HTTP API.
    Skips the test if smg is not installed."""
    if importlib.util.find_spec("smg") is None:
        pytest.skip("smg is not installed (pip install --no-deps -r deploy/smg/requirements.txt)")
    port, metrics_port = _free_ports(2)
    command = [
        sys.executable, "-P", "-m", "smg", "launch", "--host", "127.0.0.1", "--port", port,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port, "--worker-startup-check-interval", 1,
        "--log-level", "info", "--worker-urls", *(f"grpc://{target}" for target in targets),
    ]  # fmt: skip
    log = folder / "smg.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)  # noqa: ASYNC220 - it takes no time
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as http:
            while not await _is_ready(http, len(targets)):
                assert process.poll() is None, log.read_text(errors="replace")[-4000:]
                await asyncio.sleep(_PAUSE_S)
            yield http
    finally:
        process.kill()
        process.wait()


async def _is_ready(http: httpx.AsyncClient, number: int) -> bool:
    try:
        response = await http.get("/workers")
    except httpx.TransportError:
        return False
    workers = response.json().get("workers", [])
    loads = [worker.get("engine_load") or {} for worker in workers if worker["status"] == "ready"]
    models = (await http.get("/v1/tokenizers")).json().get("tokenizers", [])
    return bool(models) and len([load for load in loads if load.get("version") == "pushed"]) == number
