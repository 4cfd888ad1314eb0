"""One gRPC server on one address, and another in its place if it stops by itself.

grpc.aio reads a call's path as UTF-8 where no method has that path; if it is none, its loop ends and nothing listens
any more, so that any client could end the service. What runs on such a server runs on; here is what takes the next
calls.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc

from penstock.service.listen import Address, ListenError
from penstock.service.transport import bind, for_this_user_alone

_log = logging.getLogger(__name__)

CHECK_S = 0.1
"""How often a server is asked whether it still listens: gRPC tells nobody before the last call on it has ended."""


class Listener:
    """Listens from ``start`` to ``stop``."""

    def __init__(self, address: Address, build: Callable[[], grpc.aio.Server], is_private: bool = False) -> None:
        """``build`` makes a server with all its services, each time anew. ``is_private``: a Unix socket is this user's
        alone."""
        self._address = address
        self._build = build
        self._is_private = is_private
        self._server = build()
        self._bound = address
        self._watch: asyncio.Task[None] | None = None
        self._replaced: set[asyncio.Task[None]] = set()
        """The ends of servers that have stopped by themselves: when the last call on them is over."""

    def bind(self) -> str:
        """Returns the address with the port that was bound. Raises ListenError."""
        bound = self._bind(self._address)
        self._bound = Address.parse(bound, self._address.flag)
        return bound

    async def start(self) -> None:
        """Answers from here on."""
        await self._server.start()
        self._watch = asyncio.create_task(self._keep_open(), name="penstock listener")

    async def stop(self, grace_s: float) -> None:
        """Ends the calls that are on it after ``grace_s``, or when they are done."""
        if self._watch is not None:
            self._watch.cancel()
        for end in self._replaced:
            end.cancel()
        await asyncio.gather(self._server.stop(grace_s), *self._replaced, return_exceptions=True)
        self._address.remove()

    def _bind(self, address: Address) -> str:
        with for_this_user_alone() if self._is_private else contextlib.nullcontext():
            return bind(self._server, address)

    async def _keep_open(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._server._server.is_running():  # type: ignore[attr-defined]  # noqa: SLF001
                await self._replace()

    async def _replace(self) -> None:
        _log.error("gRPC has stopped listening on %s; another server takes its place", self._bound)
        end = asyncio.create_task(_end(self._server))
        self._replaced.add(end)
        end.add_done_callback(self._replaced.discard)
        self._server = self._build()
        # The old one closes its socket a little later, and then removes its path.
        while True:
            await asyncio.sleep(CHECK_S)
            with contextlib.suppress(ListenError):
                self._bound.check_free()
                self._bind(self._bound)
                break
        await self._server.start()


async def _end(server: grpc.aio.Server) -> None:
    """Frees a server that has stopped by itself, when the calls on it are over or this is cancelled."""
    try:
        with contextlib.suppress(Exception):  # why it has stopped
            await server.wait_for_termination()
    finally:
        await server.stop(None)
