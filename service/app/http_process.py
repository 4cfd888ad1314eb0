"""The HTTP listeners of ``penstock serve``: OpenAI's API (``--http-port``) and the status page (``--admin-http-port``).
Each is a command of ``penstock`` in a child process, which calls the service over a private Unix socket and is
restarted when it ends or hangs.

Knows processes and sockets, but not the protocols on them. The service owns the listening socket: a port in use is
detected before the model is loaded, and connections that arrive while a child is replaced wait for the next one.
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
from pathlib import Path

from penstock.clients.host.distribution import install_command
from penstock.clients.host.machine import Machine
from penstock.models.executor.child_process import child_environment
from penstock.models.executor.process import ending
from penstock.service.app.effort import Effort
from penstock.service.config.addresses import ADMIN_HTTP_FLAG, HTTP_FLAG, Address, ListenError
from penstock.service.private_directory import private_directory

EXTRA = "gateway"
"""The package's extra with the dependencies of both children."""

_CHILD = "import sys; from penstock.service.app.http_child import main; main(*sys.argv[1:])"
_BACKLOG = 2048
"""The maximum number of connections that wait while a child is replaced. The kernel's limit may be lower."""
_CHECK_S = 1.0
_END_TIMEOUT_S = 3.0
"""The time for final messages to reach HTTP clients after the service has ended their requests."""

_log = logging.getLogger(__name__)


class HttpFailed(Exception):
    """A child cannot run. The text is one line, with the remedy."""


@dataclass(frozen=True, slots=True)
class HttpCommand:
    """A command of ``penstock`` that serves HTTP in front of the service."""

    command: str
    name: str
    """What it serves, for messages."""
    flag: str
    """The flag of ``penstock serve`` that starts it."""
    target_flag: str
    """The command's flag for the service's address."""
    sends_spans: bool = False
    """Whether it sends spans itself, and so needs OpenTelemetry's variables, with the collector's key if it has one."""


GATEWAY = HttpCommand("gateway", "HTTP gateway", HTTP_FLAG, "--target", sends_spans=True)
STATUS_PAGE = HttpCommand("status-page", "status page", ADMIN_HTTP_FLAG, "--admin")


def check_installed(machine: Machine, flag: str) -> None:
    """Raises HttpFailed if the machine lacks packages of the command that ``flag`` starts."""
    missing = [package.name for package in machine.missing() if package.extra == EXTRA]
    if missing:
        raise HttpFailed(f"{flag}: not installed: {', '.join(missing)}; {install_command(EXTRA)}, or omit the flag")


@dataclass(frozen=True, slots=True)
class Patience:
    """The delays before a child is restarted, which double each time unless it had run for long, and its timeouts."""

    first_s: float = 0.1
    longest_s: float = 10.0
    steady_s: float = 60.0
    """After a child that ran for this long, the delay starts from ``first_s`` again."""
    start_s: float = 120.0
    """The maximum time from a child's start to its first heartbeat."""
    silent_s: float = 10.0
    """A child without a heartbeat for this long is killed. Time during which it waits for a core does not count."""
    starved_s: float = 120.0
    """A child that waited for a core for this long, without a heartbeat, is killed too."""


class HttpProcess:
    """A child process that serves HTTP for the lifetime of the service. For the event loop's thread."""

    def __init__(
        self,
        address: Address,
        options: Sequence[str] = (),
        patience: Patience | None = None,
        serves: HttpCommand = GATEWAY,
    ) -> None:
        """``address`` is the HTTP listener's address; ``options`` are further flags of the command."""
        self._serves = serves
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
        return None if self._process is None else self._process.pid

    def open(self) -> Address:
        """Creates a directory that only this user can enter. Returns the address in it on which the service must
        listen for the child."""
        directory = self._resources.enter_context(private_directory())
        self._directory = str(directory)
        return Address(path=directory / "socket", flag=self._serves.flag)

    def open_admin(self) -> Address:
        """Returns the address, in the directory of ``open``, on which the service must listen for the child's calls of
        its administration."""
        address = Address(path=Path(self._directory) / "admin", flag=self._serves.flag)
        self._options = (*self._options, f"--admin-target={address}")
        return address

    async def start(self, metrics: Address | None = None) -> Address:
        """Listens for HTTP, starts the child and waits until it serves. Returns the address with the bound port.
        ``metrics`` is the address of the service's metrics, which the gateway serves too. Raises ListenError, and
        HttpFailed if the child never serves."""
        if metrics is not None:
            self._options = (*self._options, f"--metrics-target={metrics.reached_at}")
        self._listener = self._resources.enter_context(self._listen())
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(self._listener, first), name=self._serves.command)
        await asyncio.wait({first, self._keeper}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            self._keeper.result()  # raises what ended it
            raise HttpFailed(f"{self._serves.flag}: the {self._serves.name} was stopped before it served")
        first.result()
        return Address(self._address.host, self._listener.getsockname()[1], flag=self._serves.flag)

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
                _log.warning("the %s did not end in time; killing it", self._serves.name)
                self._process.kill()
            await asyncio.wait({self._keeper})  # even if it failed: the rest must be stopped
        self._resources.close()

    def _listen(self) -> socket.socket:
        self._address.check_free()
        try:
            family, where = self._address.resolve()
            return socket.create_server(where[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ListenError(f"{self._address.flag} {self._address}: {error.strerror}") from None

    async def _keep(self, listener: socket.socket, first: "asyncio.Future[None]") -> None:
        """Starts a child, and restarts it when it ends, until it drains."""
        loop, delay_s = asyncio.get_running_loop(), self._patience.first_s
        while not self._drained.is_set():
            began = loop.time()
            how = await self._run(listener, first)
            if self._drained.is_set():
                return
            if not first.done():
                problem = f"{self._serves.flag}: the {self._serves.name} {how}; see its output for the reason"
                first.set_exception(HttpFailed(problem))
                return
            if loop.time() - began >= self._patience.steady_s:
                delay_s = self._patience.first_s
            _log.error("the %s %s; restarting it in %.1f s", self._serves.name, how, delay_s)
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
        target = f"{self._serves.target_flag}=unix:{self._directory}/socket"
        command = [sys.executable, "-P", "-c", _CHILD, self._directory, self._serves.command, target]
        environment = child_environment(os.environ)
        if self._serves.sends_spans:
            environment |= {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once; the child is waited for on a thread
                [*command, f"--fd={listener.fileno()}", f"--heartbeat-fd={write_end}", *self._options],
                pass_fds=[listener.fileno(), write_end],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # Ctrl-C in a terminal reaches only the service, which ends the child when it is time
            )
        except OSError as error:
            os.close(read_end)
            return f"cannot be started ({error.strerror})"
        finally:
            os.close(write_end)
        self._process = process
        _log.info("the %s is process %d", self._serves.name, process.pid)
        assert process.stdin is not None
        with process.stdin:
            pulse = _Pulse(process, self._serves.name, first, self._patience)
            beats = os.fdopen(read_end, "rb", buffering=0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: pulse, beats)
            watching = asyncio.create_task(pulse.watch(self._drained), name=f"{self._serves.command}-pulse")
            await asyncio.to_thread(process.wait)
            watching.cancel()
            transport.close()
        self._process = None
        return ending(process.returncode)


class _Pulse(asyncio.Protocol):
    """Receives a child's heartbeats, which its event loop sends every second while it serves."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", name: str, first: "asyncio.Future[None]", patience: Patience
    ) -> None:
        """``name`` is for the log; ``first`` is done at the first heartbeat."""
        self._process = process
        self._name = name
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
            _log.error("the %s sent no heartbeat for %.0f s; killing it", self._name, silent_s)
            self._process.kill()
