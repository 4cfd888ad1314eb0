"""The gateway's listener: the socket, the ASGI server, its start and its shutdown."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from penstock.clients.errors import PenstockError
from penstock.clients.gateway.server.certificate import CHECK_S, certificate_files
from penstock.clients.gateway.server.connection import TimeoutHttpProtocol
from penstock.clients.gateway.server.connection_places import ConnectionPlaces
from penstock.clients.gateway.server.paced_body import BodyPacer
from penstock.clients.gateway.server.tls_handshake import TlsHandshake
from penstock.clients.host.event_loop import MemoryWatch, calm_collector, loop_factory
from penstock.clients.host.reloaded_files import FileWatch
from penstock.clients.host.socket_lock import PathTaken, socket_lock

_BACKLOG = 2048
_BEAT_S = 1.0
_HEAD_S = 30.0
"""How long the head of a request may take to arrive; for the first one, from the start of the connection."""


@dataclass(frozen=True)
class HttpSettings:
    """The settings of the listener."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 selects a free port."""
    unix_path: Path | None = None
    """A Unix socket instead of host and port."""
    descriptor: int | None = None
    """An open listening socket, instead of either."""
    heartbeat: int | None = None
    """A descriptor to which a byte is written every second while requests are accepted."""
    certificate: Path | None = None
    """TLS: the chain, as PEM; ``private_key`` belongs to it."""
    private_key: Path | None = None
    keep_alive_s: int = 75
    """How long an idle connection is kept: longer than proxies keep theirs, so that proxies close connections first."""
    max_connections: int = 4096
    """The limit of connections. Idle ones are closed for new ones. While none is idle, requests get 503, except for
    probes."""
    max_unread_bytes: int = 64 << 20
    """The limit of buffered responses in memory. Above it, the tenant with the most loses its largest connection."""
    write_timeout_s: int = 60
    """How long a client may read nothing of a response; then its connection is closed and its request cancelled."""
    shutdown_s: int = 10
    """How long running responses may continue after a signal to stop."""


def serve(app: Starlette, http: HttpSettings, greeting: Callable[[str], str]) -> int:
    """Serves until a signal; returns the exit status. ``greeting`` makes a sentence of the URL, without a slash at its
    end. Raises PenstockError."""
    with _listening(http) as (listener, url):
        server = HttpServer(app, http, f"{greeting(url)} Ctrl-C stops it.")
        calm_collector()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            MemoryWatch().start(runner.get_loop())
            runner.run(server.serve([listener]))
        return 0 if server.started else 1


@contextlib.contextmanager
def _listening(http: HttpSettings) -> Iterator[tuple[socket.socket, str]]:
    """Opens the socket, before anything else so that a port in use is reported in one line; returns it with its
    URL."""
    with contextlib.ExitStack() as held:
        try:
            if http.unix_path is not None:
                held.enter_context(socket_lock(http.unix_path))
            listener = held.enter_context(_open_socket(http))
        except PathTaken:
            raise PenstockError(_listen_problem(http, OSError(errno.EADDRINUSE, ""))) from None
        except OSError as error:
            raise PenstockError(_listen_problem(http, error)) from None
        if http.unix_path is not None:
            held.callback(http.unix_path.unlink, missing_ok=True)
        name, scheme = listener.getsockname(), "http" if http.certificate is None else "https"
        yield listener, f"{scheme}+unix:{name}" if isinstance(name, str) else f"{scheme}://{address(*name[:2])}"


def _open_socket(http: HttpSettings) -> socket.socket:
    if http.descriptor is not None:
        return socket.socket(fileno=http.descriptor)
    if http.unix_path is not None:
        return _unix_socket(http.unix_path)
    family, _, _, _, where = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)


def address(host: str, port: int) -> str:
    """Returns the part of a URL that names a host and its port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_problem(http: HttpSettings, error: OSError) -> str:
    # An unknown name has a different kind of number, and Python adds the address to the text of other errors.
    why = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)
    if http.descriptor is not None:
        return f"cannot listen on --fd {http.descriptor}: {why}; give the number of an open socket"
    if http.unix_path is not None:
        return f"cannot listen on {http.unix_path}: {why}; choose another path with --unix-socket"
    remedies = {
        errno.EADDRINUSE: "stop what uses it, or choose another with --port",
        errno.EACCES: "choose a port of 1024 or more with --port",
    }
    remedy = remedies.get(error.errno or 0, "choose another with --host, such as 127.0.0.1")
    return f"cannot listen on {http.host}:{http.port}: {why}; {remedy}"


def _unix_socket(path: Path) -> socket.socket:
    """Opens a Unix socket, replacing one that a killed gateway left behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        if path.is_socket() and probe.connect_ex(str(path)) != 0:
            path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class HttpServer(uvicorn.Server):
    """Stops at the first signal after running responses have ended, and at the second immediately. Prints a greeting
    once it serves. While it stops, ``app.state.stop_at`` is the time, on the loop's clock, until which the app may
    continue work that no connection waits for."""

    def __init__(self, app: Starlette, http: HttpSettings, greeting: str = "") -> None:
        self._places = places = ConnectionPlaces(http.max_connections, http.max_unread_bytes)
        super().__init__(_config(app, http, places))
        self._state = app.state
        self._state.stop_at = 0.0
        app.state.gateway_metrics.bound(self.server_state.connections, places.max_connections)
        self._http = http
        self._greeting = greeting
        self._certificate_watch = FileWatch([])
        self._beating: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals on the loop; uvicorn would raise the signal again at the end, which makes an orderly exit
        look like a failure."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stop)
        try:
            yield
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)

    async def _beat(self, heartbeat: int) -> None:
        """Writes a byte every second, or less often while the loop is busy."""
        while True:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the supervisor does not read
                os.write(heartbeat, b".")
            await asyncio.sleep(_BEAT_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            if listener.family != socket.AF_UNIX:
                # Connections inherit both options from the listener. The kernel ends connections whose client, gone
                # or slow, reads nothing for this long: only the kernel knows what was read, with TLS too.
                milliseconds = self._http.write_timeout_s * 1000
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
                # uvloop sends at once in any case, asyncio only if the listener was made with its protocol. Otherwise
                # a response's second part waits 40 ms for the client's acknowledgement of the first.
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._http.heartbeat is not None:
            os.set_blocking(self._http.heartbeat, False)
        self._take_over_tls()
        await super().startup(sockets)
        if self.started and self._http.heartbeat is not None:
            self._beating = asyncio.create_task(self._beat(self._http.heartbeat), name="penstock-gateway-heartbeat")
        if self.started and self._greeting:
            print(self._greeting, flush=True)
            self._certificate_watch.start()

    def _take_over_tls(self) -> None:
        """Counts connections from their start, not from the end of the TLS handshake."""
        context, new_protocol = self.config.ssl, self.config.http_protocol_class
        chain, key = self._http.certificate, self._http.private_key
        if context is None or chain is None or key is None:
            return
        self.config.ssl = None

        def protocol(**given: Any) -> TlsHandshake:
            return TlsHandshake(context, self._places, partial(new_protocol, **given))

        self.config.http_protocol_class = protocol  # type: ignore[assignment]
        self._certificate_watch = FileWatch([certificate_files(context, chain, key)], CHECK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._certificate_watch.stop()
        self._state.stop_at = asyncio.get_running_loop().time() + self._http.shutdown_s
        if self._beating is not None:
            self._beating.cancel()
        await super().shutdown(sockets)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._state.stop_at = 0.0


def _config(app: Starlette, http: HttpSettings, places: ConnectionPlaces) -> uvicorn.Config:
    protocol = partial(
        TimeoutHttpProtocol,
        places=places,
        pacer=BodyPacer(),
        head_s=_HEAD_S,
        write_timeout_s=http.write_timeout_s,
    )
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        interface="asgi3",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=http.certificate,
        ssl_keyfile=http.private_key,
        timeout_keep_alive=http.keep_alive_s,
        timeout_graceful_shutdown=http.shutdown_s,
    )
