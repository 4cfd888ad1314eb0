"""A connection that has yet to agree on TLS. It counts and gives way as any other: asyncio's own listener tells nobody
of one before that is done, and keeps a silent one for a minute."""

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from penstock.clients.gateway.connection_places import ConnectionPlaces
from penstock.clients.gateway.eagerly import run_eagerly

HANDSHAKE_S = 10.0
"""How long a client may take for it."""


class TlsHandshake(asyncio.Protocol):
    """Gives the connection to another protocol when both sides have agreed. Until then no bytes of a request come, but
    for those right behind the handshake's last ones."""

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
        """A client has connected. From here on it is TLS that reads."""
        self._transport = cast(asyncio.Transport, transport)
        self._places.enter(self)
        self._task = run_eagerly(self._shake_hands())  # at once: what came already is for TLS, too

    def data_received(self, data: bytes) -> None:
        """The beginning of a request, in the clear."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing follows."""
        self._is_lost = True

    def cut(self) -> None:
        """Ends the connection."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()  # uvloop does not wake it up for that

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # of TLS, too: the client's affair
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
