"""The process that has Ray run ``penstock worker`` on other hosts (``--distributed-executor-backend ray``)."""

import asyncio
import dataclasses
import logging
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from penstock.models.executor.process import ending
from penstock.scheduler.worker_config import WorkerConfig
from penstock.service.config.addresses import Address
from penstock.service.config.serve_config import ServeConfig

_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737), to which nothing is sent."""
END_TIMEOUT_S = 10.0
"""How long Ray may take to end the actors."""
_CHILD = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from penstock.clients.ray.agents import main
raise SystemExit(main())
"""
"""It ends when its standard input is closed, and not by the signals that a supervisor sends to all processes."""

_log = logging.getLogger(__name__)


def with_own_address(config: ServeConfig) -> ServeConfig:
    """Returns a config whose ``--master-addr``, if it was not given, is the address from which this host reaches
    others."""
    if config.master_addr != _LOOPBACK:
        return config
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            own = probe.getsockname()[0]
        except OSError:  # no network
            return config
    return dataclasses.replace(config, master_addr=own)


class RayAgents:
    """The agents of all other hosts. Ray has a process of its own, since it changes signal handlers and starts many
    threads. For the event loop's thread."""

    def __init__(self, config: ServeConfig, worker: WorkerConfig, token: bytes | None) -> None:
        self._config = config
        self._token = token or b""
        self._resources = {"GPU": config.ranks_per_node} if worker.device == "cuda" else {"CPU": worker.num_threads}
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self, port: int, on_end: Callable[[str], None]) -> None:
        """Starts the process, whose agents join the leader at this port. ``on_end`` is called with the reason if it
        ends by itself."""
        config = self._config
        join = Address(config.master_addr).with_port(port)
        arguments = [f"--join={join}", f"--log-level={config.log_level}", f"--log-format={config.log_format}"]
        if "CPU" in self._resources:
            arguments.append(f"--threads={self._resources['CPU']}")
        tls = {"ca": config.join_tls_ca, "cert": config.join_tls_cert, "key": config.join_tls_key}
        arguments += [f"--join-tls-{name}={path}" for name, path in tls.items() if path is not None]
        order = {
            "arguments": arguments, "num_hosts": config.nnodes - 1, "resources": self._resources,
            "token": self._token.hex(), "address": config.ray_address,
        }  # fmt: skip
        self._process = subprocess.Popen([sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        self._watch = asyncio.create_task(self._report_end(self._process, on_end))

    async def stop(self) -> None:
        """Ends the process and the agents. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.warning("Ray did not end within %.0f s", END_TIMEOUT_S)
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _report_end(self, process: "subprocess.Popen[bytes]", on_end: Callable[[str], None]) -> None:
        code = await asyncio.to_thread(process.wait)
        on_end(f"--distributed-executor-backend ray: its process {ending(code)}: see its own output")
