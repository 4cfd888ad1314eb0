"""Caches queries to the service for callers without a key, so that they cannot cause many."""

import copy
from collections.abc import Awaitable, Callable

import grpc

from penstock.clients.errors import RequestFailed
from penstock.clients.failover.target_list import any_is_serving
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.upstream.recent import Recent

_HEALTH_S = 0.5
"""How long the service's health is cached. The service limits concurrent health checks."""


class ServiceState:
    """Finds out whether the service accepts requests, and whether callers need a key."""

    def __init__(
        self, channel: grpc.aio.Channel, settings: GatewaySettings, requires_keys: Callable[[], Awaitable[bool]]
    ) -> None:
        """``requires_keys`` raises RequestFailed if the service does not respond."""
        self._channel = channel
        self._timeout_s = settings.call_timeout_s
        self._health = Recent(self._fetch_health, _HEALTH_S)
        self._was_serving = False
        self._keys = Recent(requires_keys, settings.recheck_caller_s)
        self._needed_key: bool | None = None

    async def is_serving(self) -> bool:
        """Returns whether the service accepts requests, as of half a second ago. False if it does not respond."""
        return await self._health.get()

    async def needs_key(self) -> bool:
        """Returns whether callers need a key. Queries the service again after a while; if it does not respond, its last
        response counts. Raises RequestFailed if it has never responded."""
        try:
            needs_key = self._needed_key = await self._keys.get()
        except RequestFailed as failure:
            if self._needed_key is None:
                raise copy.copy(failure) from None  # every task raises its own copy
            needs_key = self._needed_key
        return needs_key

    async def _fetch_health(self) -> bool:
        try:
            self._was_serving = await any_is_serving(self._channel, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            # The service had too many concurrent health checks, which does not mean that it is unhealthy.
            self._was_serving = self._was_serving and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return self._was_serving
