"""Handles the TLS handshake of a connection, which is counted and may be closed like any other meanwhile. asyncio's own
listener reports a connection only after the handshake, and keeps a silent one for a minute."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from penstock.clients.gateway.server.connection_places import ConnectionPlaces
from penstock.clients.gateway.upstream.eagerly import run_eagerly

HANDSHAKE_S = 10.0


class TlsHandshake(asyncio.Protocol):
    """Hands the connection to another protocol after the handshake. Before that no bytes of a request arrive, except
    those that come together with the handshake's last bytes."""

    tenant = ""
    num_unread = 0

    def __init__(
        self,
        context: ssl.SSLContext,
        places: ConnectionPlaces,
        new_protocol: Callable[[], asyncio.Protocol],
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self._context = context
        self._places = places
        self._new_protocol = new_protocol
        self._timeout_s = timeout_s
        self._early = b""
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._places.enter(self)
        self._task = run_eagerly(self._shake_hands())  # at once: bytes that have already arrived belong to TLS

    def data_received(self, data: bytes) -> None:
        """Keeps the beginning of a request that came together with the end of the handshake."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True

    def cut(self) -> None:
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()  # uvloop does not wake it up for that

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # a failed handshake is the client's problem
            transport = None
        finally:
            self._places.leave(self)
        if transport is None or transport.is_closing() or self._is_lost:
            return
        protocol = self._new_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(self._early)
