"""What the gateway asks of the service without a key, for whoever comes: so it asks seldom."""

import copy
from collections.abc import Awaitable, Callable

import grpc

from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.recent import Recent
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.health import is_serving

_HEALTH_S = 0.5
"""How long the service's health is believed. The service answers a bounded number of such questions at once."""


class ServiceState:
    """Whether the service takes requests, and whether it wants a key with them."""

    def __init__(
        self, channel: grpc.aio.Channel, settings: GatewaySettings, ask_for_keys: Callable[[], Awaitable[bool]]
    ) -> None:
        """``ask_for_keys`` raises RequestFailed where the service does not answer."""
        self._channel = channel
        self._timeout_s = settings.call_timeout_s
        self._health = Recent(self._ask_for_health, _HEALTH_S)
        self._was_serving = False
        self._keys = Recent(ask_for_keys, settings.recheck_caller_s)
        self._needed_key: bool | None = None
        """By its last answer."""

    async def is_serving(self) -> bool:
        """Whether it takes requests, as of half a second ago; not if it does not answer."""
        return await self._health.get()

    async def needs_key(self) -> bool:
        """Whether callers must show a key. It is asked again after a while; if it does not answer then, it is as
        before. Raises RequestFailed where it never answered."""
        try:
            needs_key = self._needed_key = await self._keys.get()
        except RequestFailed as failure:
            if self._needed_key is None:
                raise copy.copy(failure) from None  # each is raised in a task of its own
            needs_key = self._needed_key
        return needs_key

    async def _ask_for_health(self) -> bool:
        try:
            self._was_serving = await is_serving(self._channel, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            # A service that is asked by too many at once is as it was.
            self._was_serving = self._was_serving and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return self._was_serving
