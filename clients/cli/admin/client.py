"""Calls AdminService for the operators' commands, with errors that contain a remedy."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

import penstock.v1 as pb
from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.cli.as_dict import duration_of
from penstock.clients.cli.options import ADMIN_VARIABLE, ConnectionOptions, advised
from penstock.clients.errors import PenstockError, Unreachable, failure_from_call
from penstock.v1.admin_pb2_grpc import AdminServiceStub

_TIMEOUT_S = 10.0
"""The deadline of calls that return at once."""


class AdminClient:
    """The admin API of one service. All methods raise PenstockError."""

    def __init__(self, channel: grpc.aio.Channel, service: ConnectionOptions) -> None:
        self._stub: Any = AdminServiceStub(channel)
        self._target = service.target
        self._metadata = call_metadata(service.api_key)

    @classmethod
    @asynccontextmanager
    async def opened(cls, service: ConnectionOptions) -> AsyncIterator["AdminClient"]:
        """Opens a client with its own channel."""
        async with open_channel(service.target, service.tls) as channel:
            yield cls(channel, service)

    async def call(self, method: str, request: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        """Calls a unary method, such as ``Drain``."""
        with self._explained():
            return await getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout_s)

    async def watch_stats(self, interval_s: float) -> AsyncGenerator[pb.WatchStatsResponse, None]:
        """Yields statistics until the service ends."""
        with self._explained():
            request = pb.WatchStatsRequest(interval=duration_of(interval_s))
            call = self._stub.WatchStats(request, metadata=self._metadata)
            try:
                async for stats in call:
                    yield stats
            finally:
                call.cancel()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with advised():
            try:
                yield
            except grpc.aio.AioRpcError as error:
                failure = failure_from_call(error, self._target)
                if isinstance(failure, Unreachable) and not failure.speaks_no_tls:
                    raise PenstockError(
                        f"{failure.message}\npass the address of the admin listener: --admin HOST:PORT, or "
                        f"${ADMIN_VARIABLE}; penstock serve prints it"
                    ) from None
                if failure.code is grpc.StatusCode.UNIMPLEMENTED:
                    raise PenstockError(
                        f"{self._target} is not the admin listener of a penstock service, which is separate from the "
                        "callers'; penstock serve prints both addresses"
                    ) from None
                raise failure from None


def call_admin(service: ConnectionOptions, method: str, request: Any, timeout_s: float = _TIMEOUT_S) -> Any:
    """Calls one unary method. Raises PenstockError."""

    async def call() -> Any:
        async with AdminClient.opened(service) as client:
            return await client.call(method, request, timeout_s)

    return asyncio.run(call())
