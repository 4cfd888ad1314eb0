"""The OpenAI-compatible HTTP gateway of ``penstock serve --http-port``: ``penstock gateway`` as a child process, which
calls the service over a private Unix socket and is started again when it ends or hangs.

Knows processes and sockets; what is spoken on them it does not know. The listening socket is the service's own: a port
in use is found out before a model is loaded, and connections that come while a gateway is replaced wait for the next.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from penstock.clients.host.machine import Machine
from penstock.models.executor.child_process import child_environment
from penstock.models.executor.process import ending
from penstock.service.app.effort import Effort
from penstock.service.app.private_directory import private_directory
from penstock.service.config.addresses import HTTP_FLAG, Address, ListenError

EXTRA = "gateway"
"""Of the package: what the gateway needs to run."""

_CHILD = "import sys; from penstock.service.app.gateway_child import main; main(*sys.argv[1:])"
_BACKLOG = 2048
"""Connections that wait while a gateway is replaced; the kernel's own limit may be lower."""
_LOOK_S = 1.0
_END_TIMEOUT_S = 3.0
"""How long last words may take to reach HTTP clients, once the service has ended their requests."""

_log = logging.getLogger(__name__)


class GatewayFailed(Exception):
    """There can be no gateway. The text is one line, with the remedy."""


def check_installed(machine: Machine) -> None:
    """Raises GatewayFailed if it lacks packages."""
    missing = [package.name for package in machine.missing() if package.extra == EXTRA]
    if missing:
        raise GatewayFailed(
            f"{HTTP_FLAG}: not installed: {', '.join(missing)}; pip install 'penstock[{EXTRA}]', or leave the flag out"
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How soon a gateway that ended is followed by another: twice as late each time, unless it had served for long."""

    first_s: float = 0.1
    longest_s: float = 10.0
    steady_s: float = 60.0
    """One that lived for so long has proven that it can."""
    start_s: float = 120.0
    """How long one may take to serve."""
    silent_s: float = 10.0
    """How long one that serves may give no sign of life before it is killed, not counting when it waits for a core."""
    starved_s: float = 120.0
    """How long it may give no sign of life in any case."""


class HttpGateway:
    """A child that serves HTTP as long as the service lives. For the event loop's thread."""

    def __init__(self, address: Address, options: Sequence[str] = (), patience: Patience | None = None) -> None:
        """``address`` is where HTTP is served; ``options`` are further flags of ``penstock gateway``."""
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
        """Of the running child."""
        return None if self._process is None else self._process.pid

    def open(self) -> Address:
        """Makes the directory that only this user can enter; returns the address in it where the service is to listen
        for the child."""
        directory = self._resources.enter_context(private_directory())
        self._directory = str(directory)
        return Address(path=directory / "socket", flag=HTTP_FLAG)

    async def start(self, metrics: Address | None = None) -> Address:
        """Listens for HTTP, starts the child and waits until it serves; returns the address with the port that was
        bound. ``metrics``: where those of the service are, which the gateway then shows too. Raises ListenError, and
        GatewayFailed for a child that never serves."""
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
        """From here on new connections are refused; what is answered goes on."""
        if self._drained.is_set():
            return  # a second signal would cut off what is answered
        self._drained.set()
        if self._listener is not None:
            self._listener.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    async def stop(self) -> None:
        """Ends the child, when its requests have ended or soon after, and removes the directory. Safe to call twice."""
        self.drain()
        if self._keeper is not None:
            done, _ = await asyncio.wait({self._keeper}, timeout=_END_TIMEOUT_S)
            if not done and self._process is not None:
                _log.warning("the HTTP gateway did not end in time; it is killed")
                self._process.kill()
            await asyncio.wait({self._keeper})  # however it ended: what is left to stop must be stopped
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
        """Starts a child, and another when it has ended, until the gateway drains."""
        loop, delay_s = asyncio.get_running_loop(), self._patience.first_s
        while not self._drained.is_set():
            began = loop.time()
            how = await self._run(listener, first)
            if self._drained.is_set():
                return
            if not first.done():
                first.set_exception(GatewayFailed(f"{HTTP_FLAG}: the gateway {how}; its own output says why"))
                return
            if loop.time() - began >= self._patience.steady_s:
                delay_s = self._patience.first_s
            _log.error("the HTTP gateway %s; it is started again in %.1f s", how, delay_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), delay_s)
                return
            delay_s = min(2 * delay_s, self._patience.longest_s)

    async def _run(self, listener: socket.socket, first: "asyncio.Future[None]") -> str:
        """One life of a child; returns how it ended. ``first`` is done when it serves."""
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
                env=child_environment(os.environ),
                process_group=0,  # Ctrl-C in a terminal reaches the service alone, which then says when
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


class _Pulse(asyncio.Protocol):
    """The heartbeats of a child, which its event loop sends every second while it serves."""

    def __init__(self, process: "subprocess.Popen[bytes]", first: "asyncio.Future[None]", patience: Patience) -> None:
        """``first`` is done with the first one."""
        self._process = process
        self._first = first
        self._patience = patience
        self._allowed_s = patience.start_s
        self._silent_s = 0.0
        self._starved_s = 0.0
        """How much of the time without a sign of life it was ready to run but got no core."""

    def data_received(self, data: bytes) -> None:
        """It lives."""
        self._allowed_s, self._silent_s, self._starved_s = self._patience.silent_s, 0.0, 0.0
        if not self._first.done():
            self._first.set_result(None)

    async def watch(self, drained: asyncio.Event) -> None:
        """Kills a child that is silent for too long. One that drains is silent, and is waited for elsewhere."""
        effort = Effort(self._process.pid)
        while self._silent_s < self._allowed_s and self._starved_s < self._patience.starved_s:
            # Counted in looks of ours: a service that was itself stopped for a while blames nobody for it.
            look_s = min(_LOOK_S, self._allowed_s)
            await asyncio.sleep(look_s)
            if effort.is_starved(look_s):
                self._starved_s += look_s
            else:
                self._silent_s += look_s
        if not drained.is_set():
            silent_s = self._silent_s + self._starved_s
            _log.error("the HTTP gateway gave no sign of life for %.0f s; it is killed", silent_s)
            self._process.kill()
