"""Calls the service's administration for the page, each time with the operator's key: the service checks it, so a
revoked key loses its access with the next call."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

import penstock.v1 as pb
from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.cli.as_dict import duration_of
from penstock.clients.errors import RequestFailed, failure_from_call
from penstock.clients.gateway.upstream.recent import Recent
from penstock.clients.status_page.settings import StatusPageSettings
from penstock.v1.admin_pb2_grpc import AdminServiceStub

T = TypeVar("T")
_LAG_INTERVAL_S = 2.0
"""The period of the reported lag of the service's event loop."""


class AdminLink:
    """A channel to the admin listener. All calls raise RequestFailed."""

    def __init__(self, channel: grpc.aio.Channel, settings: StatusPageSettings) -> None:
        self._stub: Any = AdminServiceStub(channel)
        self._target = settings.service.target
        self._timeout_s = settings.call_timeout_s
        self._keys = Recent(self._fetch_needs_key, settings.recheck_s)
        self._needed_key: bool | None = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: StatusPageSettings) -> AsyncIterator["AdminLink"]:
        async with open_channel(settings.service.target, settings.service.tls) as channel:
            yield cls(channel, settings)

    async def needs_key(self) -> bool:
        """Returns whether the service needs a key. If it does not respond, its last response counts."""
        try:
            self._needed_key = await self._keys.get()
        except RequestFailed as failure:
            if self._needed_key is None:
                raise RequestFailed(failure.code, failure.message) from None  # every task raises its own
        return self._needed_key

    async def stats(self, key: str | None) -> pb.WatchStatsResponse:

        async def first(request: pb.WatchStatsRequest, **options: Any) -> pb.WatchStatsResponse:
            watch = self._stub.WatchStats(request, **options)
            try:
                stats = await watch.read()
            finally:
                watch.cancel()
            if not isinstance(stats, pb.WatchStatsResponse):
                raise RequestFailed(grpc.StatusCode.UNAVAILABLE, "the service sent no statistics")
            return stats

        return await self._call(first, pb.WatchStatsRequest(interval=duration_of(_LAG_INTERVAL_S)), key)

    async def requests(self, key: str | None, page_size: int, page_token: str) -> pb.ListRequestsResponse:
        request = pb.ListRequestsRequest(page_size=page_size, page_token=page_token)
        return await self._call(self._stub.ListRequests, request, key)

    async def cancel(self, key: str | None, request_id: str) -> bool:
        """Cancels a request. Returns whether it was live."""
        request = pb.CancelRequestsRequest(ids=pb.RequestIds(request_ids=[request_id]))
        response: pb.CancelRequestsResponse = await self._call(self._stub.CancelRequests, request, key)
        return response.cancelled_requests > 0

    async def check_key(self, key: str | None) -> None:
        """Raises RequestFailed if the key may not administer."""
        await self._call(self._stub.GetSettings, pb.GetSettingsRequest(), key)

    async def _fetch_needs_key(self) -> bool:
        try:
            await self.check_key(None)
        except RequestFailed as failure:
            if failure.code is not grpc.StatusCode.UNAUTHENTICATED:
                raise
            return True
        return False

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any, key: str | None) -> T:
        try:
            return await method(request, metadata=call_metadata(key), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self._target) from None
