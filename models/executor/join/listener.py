"""Accepts the connections of other hosts, with TLS or without, and bounds those that have not shown yet that they may
join."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable

from penstock.models.executor.join.link import JoinLink, plain_address, tune
from penstock.models.executor.join.refusal import JoinRefused

logger = logging.getLogger(__name__)

MAX_STRANGERS = 16
"""The limit of connections that have not shown that they may join. A further one ends the oldest."""
TLS_HANDSHAKE_S = 5.0

_TLS_FIRST_BYTE = b"\x16"
"""The first byte of a TLS connection."""


class JoinListener:
    """A TCP listener. All methods must be called on the event loop's thread."""

    def __init__(self, tls: ssl.SSLContext | None, serve: Callable[[socket.socket, str], Awaitable[None]]) -> None:
        """``serve`` serves a connection, from an address, until it ends. Each call is a task of its own."""
        self._tls = tls
        self._serve = serve
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: list[asyncio.Task[None]] = []

    async def open(self, host: str, port: int) -> int:
        """Listens; 0 is any free port. Returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = loop.create_task(self._accept(listener))
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Ends the listener and all connections. Safe to call twice."""
        tasks = [task for task in (self._accepting, *self._connections) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def trust(self) -> None:
        """Records that the connection of the current task has shown that it may join."""
        task = asyncio.current_task()
        if task in self._strangers:
            self._strangers.remove(task)

    async def open_link(self, connection: socket.socket) -> tuple[JoinLink, JoinRefused | None]:
        """Returns the link of a connection, and why it is refused: it must use TLS exactly if this listener does.
        Raises OSError if TLS fails."""
        loop = asyncio.get_running_loop()
        is_tls = await _first_byte(connection) == _TLS_FIRST_BYTE
        tls = self._tls if is_tls else None
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_S
        )
        link = JoinLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        if is_tls == (self._tls is not None):
            return link, None
        uses = "the agent uses TLS, and the leader does not" if is_tls else "the agent uses no TLS, and the leader does"
        return link, JoinRefused(f"{uses}: give --join-tls-ca, -cert and -key to both or to neither")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no free descriptor, for instance
                logger.error("the port for other hosts cannot accept a connection: %s", error)
                await asyncio.sleep(1.0)
                continue
            connection.setblocking(False)
            tune(connection)
            task = asyncio.ensure_future(self._run(connection, plain_address(address)))
            self._connections.add(task)
            self._strangers.append(task)
            task.add_done_callback(self._on_end)
            if len(self._strangers) > MAX_STRANGERS:
                self._strangers.pop(0).cancel()

    async def _run(self, connection: socket.socket, address: str) -> None:
        try:
            await self._serve(connection, address)
        finally:
            connection.close()

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._connections.discard(task)
        if task in self._strangers:
            self._strangers.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection of another host failed", exc_info=error)


def tls_problem(error: OSError) -> str:
    """Returns the reason of a failed TLS connection in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message or "the certificate cannot be verified"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, ConnectionError):
        return "the other side ended it; its log has the reason"
    return error.strerror or str(error) or type(error).__name__


async def _first_byte(connection: socket.socket) -> bytes:
    """Waits for the first byte, and leaves it to be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())
    return connection.recv(1, socket.MSG_PEEK)
