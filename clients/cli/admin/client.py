"""Calls AdminService for the operators' commands, with errors that contain a remedy."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.cli.options import ADMIN_VARIABLE, ConnectionOptions, advised
from penstock.clients.errors import PenstockError, RequestFailed, Unreachable, failure_from_call
from penstock.v1.admin_pb2_grpc import AdminServiceStub

_TIMEOUT_S = 10.0
"""The deadline of calls that return at once."""


class AdminClient:
    """The admin API of one service."""

    def __init__(self, channel: grpc.aio.Channel, service: ConnectionOptions) -> None:
        self._stub: Any = AdminServiceStub(channel)
        self._target = service.target
        self._metadata = call_metadata(service.api_key)

    @classmethod
    @asynccontextmanager
    async def opened(cls, service: ConnectionOptions) -> AsyncIterator["AdminClient"]:
        """Opens a client with its own channel. Raises PenstockError."""
        async with open_channel(service.target, service.tls) as channel:
            yield cls(channel, service)

    async def call(self, method: str, request: Any, timeout_s: float = _TIMEOUT_S) -> Any:
        """Calls a unary method, such as ``Drain``. Raises PenstockError."""
        with self._explained():
            return await getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout_s)

    async def watch(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        """Yields the messages of a streaming method, such as ``WatchStats``. Raises PenstockError."""
        with self._explained():
            call = getattr(self._stub, method)(request, metadata=self._metadata)
            try:
                async for answer in call:
                    yield answer
            finally:
                call.cancel()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with advised():
            try:
                yield
            except grpc.aio.AioRpcError as error:
                raise _explained(failure_from_call(error, self._target), self._target) from None


def _explained(failure: RequestFailed, target: str) -> PenstockError:
    if isinstance(failure, Unreachable) and not failure.speaks_no_tls:
        return PenstockError(
            f"{failure.message}\npass the address of the admin listener: --admin HOST:PORT, or ${ADMIN_VARIABLE}; "
            "penstock serve prints it"
        )
    if failure.code is grpc.StatusCode.UNIMPLEMENTED:
        return PenstockError(
            f"{target} is not the admin listener of a penstock service, which is separate from the callers'; "
            "penstock serve prints both addresses"
        )
    return failure
