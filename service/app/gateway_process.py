"""The OpenAI-compatible HTTP gateway of ``penstock serve --http-port``: ``penstock gateway`` as a child process, which
calls the service over a private Unix socket and is restarted when it ends or hangs.

Knows processes and sockets, but not the protocols on them. The service owns the listening socket: a port in use is
detected before the model is loaded, and connections that arrive while a gateway is replaced wait for the next one.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from penstock.clients.host.distribution import install_command
from penstock.clients.host.machine import Machine
from penstock.models.executor.child_process import child_environment
from penstock.models.executor.process import ending
from penstock.service.app.effort import Effort
from penstock.service.app.private_directory import private_directory
from penstock.service.config.addresses import HTTP_FLAG, Address, ListenError

EXTRA = "gateway"
"""The package's extra with the gateway's dependencies."""

_CHILD = "import sys; from penstock.service.app.gateway_child import main; main(*sys.argv[1:])"
_BACKLOG = 2048
"""The maximum number of connections that wait while a gateway is replaced. The kernel's limit may be lower."""
_CHECK_S = 1.0
_END_TIMEOUT_S = 3.0
"""The time for final messages to reach HTTP clients after the service has ended their requests."""

_log = logging.getLogger(__name__)


class GatewayFailed(Exception):
    """The gateway cannot run. The text is one line, with the remedy."""


def check_installed(machine: Machine) -> None:
    """Raises GatewayFailed if the machine lacks packages of the gateway."""
    missing = [package.name for package in machine.missing() if package.extra == EXTRA]
    if missing:
        raise GatewayFailed(
            f"{HTTP_FLAG}: not installed: {', '.join(missing)}; {install_command(EXTRA)}, or omit the flag"
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """The delays before a gateway is restarted, which double each time unless it had run for long, and its timeouts."""

    first_s: float = 0.1
    longest_s: float = 10.0
    steady_s: float = 60.0
    """After a gateway that ran for this long, the delay starts from ``first_s`` again."""
    start_s: float = 120.0
    """The maximum time from a gateway's start to its first heartbeat."""
    silent_s: float = 10.0
    """A gateway without a heartbeat for this long is killed. Time during which it waits for a core does not count."""
    starved_s: float = 120.0
    """A gateway that waited for a core for this long, without a heartbeat, is killed too."""


class HttpGateway:
    """A child process that serves HTTP for the lifetime of the service. For the event loop's thread."""

    def __init__(self, address: Address, options: Sequence[str] = (), patience: Patience | None = None) -> None:
        """``address`` is the HTTP listener's address; ``options`` are further flags of ``penstock gateway``."""
        self._address = address
        self._options = options
        self._patience = patience or Patience()
        self._resources = ExitStack()
        self._directory = ""
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id of the running child, if any."""
        return None if self._process is None else self._process.pid

    def open(self) -> Address:
        """Creates a directory that only this user can enter. Returns the address in it on which the service must
        listen for the child."""
        directory = self._resources.enter_context(private_directory())
        self._directory = str(directory)
        return Address(path=directory / "socket", flag=HTTP_FLAG)

    async def start(self, metrics: Address | None = None) -> Address:
        """Listens for HTTP, starts the child and waits until it serves. Returns the address with the bound port.
        ``metrics`` is the address of the service's metrics, which the gateway then serves too. Raises ListenError, and
        GatewayFailed if the child never serves."""
        if metrics is not None:
            self._options = (*self._options, f"--metrics-target={metrics.reached_at}")
        self._listener = self._resources.enter_context(self._listen())
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(self._listener, first), name="http-gateway")
        await asyncio.wait({first, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            self._keeper.result()  # raises what ended it
            raise GatewayFailed(f"{HTTP_FLAG}: the gateway was stopped before it served")
        first.result()
        return Address(self._address.host, self._listener.getsockname()[1], flag=HTTP_FLAG)

    def drain(self) -> None:
        """Refuses new connections; running responses continue."""
        if self._drained.is_set():
            return  # a second signal would cut off running responses
        self._drained.set()
        if self._listener is not None:
            self._listener.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    async def stop(self) -> None:
        """Ends the child when its requests have ended or soon after, and removes the directory. Safe to call twice."""
        self.drain()
        if self._keeper is not None:
            done, _ = await asyncio.wait({self._keeper}, timeout=_END_TIMEOUT_S)
            if not done and self._process is not None:
                _log.warning("the HTTP gateway did not end in time; killing it")
                self._process.kill()
            await asyncio.wait({self._keeper})  # even if it failed: the rest must be stopped
        self._resources.close()

    def _listen(self) -> socket.socket:
        self._address.check_free()
        try:
            family, _, _, _, where = socket.getaddrinfo(
                self._address.host, self._address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ListenError(f"{self._address.flag} {self._address}: {error.strerror}") from None

    async def _keep(self, listener: socket.socket, first: "asyncio.Future[None]") -> None:
        """Starts a child, and restarts it when it ends, until the gateway drains."""
        loop, delay_s = asyncio.get_running_loop(), self._patience.first_s
        while not self._drained.is_set():
            began = loop.time()
            how = await self._run(listener, first)
            if self._drained.is_set():
                return
            if not first.done():
                first.set_exception(GatewayFailed(f"{HTTP_FLAG}: the gateway {how}; see its output for the reason"))
                return
            if loop.time() - began >= self._patience.steady_s:
                delay_s = self._patience.first_s
            _log.error("the HTTP gateway %s; restarting it in %.1f s", how, delay_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), delay_s)
                return
            delay_s = min(2 * delay_s, self._patience.longest_s)

    async def _run(self, listener: socket.socket, first: "asyncio.Future[None]") -> str:
        """Runs one child until it ends; returns how it ended. ``first`` is done when the child serves."""
        try:
            read_end, write_end = os.pipe()
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        command = [sys.executable, "-P", "-c", _CHILD, self._directory, f"--target=unix:{self._directory}/socket"]
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; the child is waited for on a thread
                [*command, f"--fd={listener.fileno()}", f"--heartbeat-fd={write_end}", *self._options],
                pass_fds=[listener.fileno(), write_end],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=child_environment(os.environ) | _of_telemetry(os.environ),
                process_group=0,  # Ctrl-C in a terminal reaches only the service, which ends the child when it is time
            )
        except OSError as error:
            os.close(read_end)
            return f"cannot be started ({error.strerror})"
        finally:
            os.close(write_end)
        self._process = process
        _log.info("the HTTP gateway is process %d", process.pid)
        assert process.stdin is not None
        with process.stdin:
            pulse = _Pulse(process, first, self._patience)
            beats = os.fdopen(read_end, "rb", buffering=0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: pulse, beats)
            watching = asyncio.create_task(pulse.watch(self._drained), name="http-gateway-pulse")
            await asyncio.to_thread(process.wait)
            watching.cancel()
            transport.close()
        self._process = None
        return ending(process.returncode)


def _of_telemetry(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns OpenTelemetry's own variables: the gateway sends its spans itself, with the collector's key if it needs
    one."""
    return {name: value for name, value in environ.items() if name.startswith("OTEL_")}


class _Pulse(asyncio.Protocol):
    """Receives a child's heartbeats, which its event loop sends every second while it serves."""

    def __init__(self, process: "subprocess.Popen[bytes]", first: "asyncio.Future[None]", patience: Patience) -> None:
        """``first`` is done at the first heartbeat."""
        self._process = process
        self._first = first
        self._patience = patience
        self._allowed_s = patience.start_s
        self._silent_s = 0.0
        self._starved_s = 0.0
        """The part of the time without a heartbeat in which the child was ready to run but got no core."""

    def data_received(self, data: bytes) -> None:
        """Resets the timers at a heartbeat."""
        self._allowed_s, self._silent_s, self._starved_s = self._patience.silent_s, 0.0, 0.0
        if not self._first.done():
            self._first.set_result(None)

    async def watch(self, drained: asyncio.Event) -> None:
        """Kills a child that sends no heartbeat for too long. A child that drains sends none; ``stop`` waits for it."""
        effort = Effort(self._process.pid)
        while self._silent_s < self._allowed_s and self._starved_s < self._patience.starved_s:
            # Counts its own checks instead of clock time: if the service itself was stopped for a while, that time
            # must not count against the child.
            check_s = min(_CHECK_S, self._allowed_s)
            await asyncio.sleep(check_s)
            if effort.is_starved(check_s):
                self._starved_s += check_s
            else:
                self._silent_s += check_s
        if not drained.is_set():
            silent_s = self._silent_s + self._starved_s
            _log.error("the HTTP gateway sent no heartbeat for %.0f s; killing it", silent_s)
            self._process.kill()
