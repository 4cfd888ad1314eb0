"""The gateway smg as a process, in front of services with ``--contracts vllm`` or of their HTTP gateways."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from wire.http_get import plain_client

SMG_IS_MISSING = "smg is not installed (pip install --no-deps -r deploy/smg/requirements.txt)"
_PAUSE_S = 0.05


def has_smg() -> bool:
    """Whether smg is installed."""
    return importlib.util.find_spec("smg") is not None


def _free_ports(number: int) -> list[int]:
    """Returns ports that nothing listens on. smg does not report its port, so it cannot choose one itself."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@asynccontextmanager
async def running_smg(folder: Path, *urls: str) -> AsyncIterator[httpx.AsyncClient]:
    """Runs smg in front of workers with these URLs, ``grpc://`` or ``http://``. Yields a client of its HTTP API when
    each worker is ready, and has sent its load if it is called over gRPC. Skips the test if smg is not installed."""
    if not has_smg():
        pytest.skip(SMG_IS_MISSING)
    port, metrics_port = _free_ports(2)
    command = [
        sys.executable, "-P", "-m", "smg", "launch", "--host", "127.0.0.1", "--port", port,
        "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port, "--worker-startup-check-interval", 1,
        "--log-level", "info", "--worker-urls", *urls,
    ]  # fmt: skip
    log = folder / "smg.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)  # noqa: ASYNC220 - it takes no time
    try:
        async with plain_client(f"http://127.0.0.1:{port}") as http:
            while not await _is_ready(http, urls):
                assert process.poll() is None, log.read_text(errors="replace")[-4000:]
                await asyncio.sleep(_PAUSE_S)
            yield http
    finally:
        process.kill()
        process.wait()


async def _is_ready(http: httpx.AsyncClient, urls: Sequence[str]) -> bool:
    try:
        response = await http.get("/workers")
    except httpx.TransportError:
        return False
    ready = {worker["url"]: worker for worker in response.json().get("workers", []) if worker["status"] == "ready"}
    over_grpc = [url for url in urls if url.startswith("grpc:")]
    loads = [ready[url].get("engine_load") or {} for url in over_grpc if url in ready]
    if len(ready) < len(urls) or any(load.get("version") != "pushed" for load in loads):
        return False
    # It renders chats itself only for workers that it calls over gRPC.
    return not over_grpc or bool((await http.get("/v1/tokenizers")).json().get("tokenizers", []))
