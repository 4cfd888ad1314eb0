"""AdminService: operators and routers inspect a running service and change its settings.

This file only validates each request and passes it to the part that handles it. Changes are logged with the tenant of
the caller's key.
"""

import logging
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import text_format

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.service.admin.adapters import adapter_message
from penstock.service.admin.explain import explain
from penstock.service.admin.kv_events import KvEvents
from penstock.service.admin.live_requests import LiveRequests
from penstock.service.admin.settings import RunningSettings
from penstock.service.admin.stats import StatsFeed
from penstock.service.auth.identity import current_principal
from penstock.service.config.limits import Validator
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.adapters import AdapterRegistry
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.v1 import admin_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)

_MAX_LOGGED = 1000
"""The maximum number of characters of a logged change."""


class AdminService(pb_grpc.AdminServiceServicer):
    """Needs a started engine."""

    def __init__(
        self,
        engine: Engine,
        validator: Validator,
        loop_lag: LoopLag,
        recent_stats: RecentStats,
        is_going_down: Callable[[], bool],
        configured: Callable[[], SchedulerConfig],
        adapters: AdapterRegistry,
    ) -> None:
        """``is_going_down`` returns whether the process is ending and can never accept new requests again.
        ``configured`` returns the configuration by the command line and its files. ``adapters`` are those that requests
        may name."""
        self._engine = engine
        self._validator = validator
        self._adapters = adapters
        self._is_going_down = is_going_down
        self._live_requests = LiveRequests(engine)
        self._settings = RunningSettings(engine, configured)
        self._stats = StatsFeed(engine, loop_lag, recent_stats)
        self._kv_events = KvEvents(engine.kv_events)

    def close(self) -> None:
        """Ends all watches, because the service shuts down."""
        self._stats.close()
        self._kv_events.close()

    # The generated base class knows only handlers that yield; gRPC also accepts handlers that write.
    async def WatchStats(  # type: ignore[override]
        self, request: pb.WatchStatsRequest, context: Context
    ) -> None:
        self._validator.check(request)
        await self._stats.WatchStats(request, context)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Makes the engine refuse new requests. The server's watch of the engine's state does the rest."""
        self._engine.drain()
        _log_change("new requests are refused")
        return pb.DrainResponse(live_requests=self._engine.stats().requests)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Makes the engine accept new requests again. Succeeds even if it was not draining."""
        if self._is_going_down():
            raise ServiceError(Reason.GOING_DOWN)
        if self._engine.resume():
            _log_change("new requests are accepted again")
        return pb.ResumeResponse()

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drops all cached blocks, except blocks that rows hold."""
        num_blocks = self._engine.flush_cache()
        _log_change(f"{num_blocks} cached blocks are dropped")
        return pb.FlushCacheResponse(flushed_blocks=num_blocks)

    async def GetSettings(self, request: pb.GetSettingsRequest, context: Context) -> pb.GetSettingsResponse:
        return pb.GetSettingsResponse(settings=self._settings.get())

    async def UpdateSettings(self, request: pb.UpdateSettingsRequest, context: Context) -> pb.UpdateSettingsResponse:
        self._validator.check(request)
        settings = self._settings.update(request)
        _log_change(f"changed {text_format.MessageToString(request, as_one_line=True)}")
        return pb.UpdateSettingsResponse(settings=settings)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        self._validator.check(request)
        return explain(self._engine, request.request_id)

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        self._validator.check(request)
        return await self._live_requests.list_requests(request)

    async def CancelRequests(self, request: pb.CancelRequestsRequest, context: Context) -> pb.CancelRequestsResponse:
        self._validator.check(request)
        response = pb.CancelRequestsResponse()
        try:
            await self._live_requests.cancel(request, response)
        finally:  # those that were cancelled before the caller left are logged too
            if response.cancelled_requests:
                target = text_format.MessageToString(request, as_one_line=True)
                _log_change(f"requests cancelled: {response.cancelled_requests} of {target}")
        return response

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Loads an adapter, unless it is loaded already."""
        self._validator.check(request)
        adapter = await self._adapters.load(request.name, request.path)
        _log_change(f"the adapter {adapter.name} is loaded from {adapter.path}")
        return pb.LoadAdapterResponse(adapter=adapter_message(adapter))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        self._validator.check(request)
        self._adapters.unload(request.name)
        _log_change(f"the adapter {request.name} is unloaded")
        return pb.UnloadAdapterResponse()

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(adapter_message, self._adapters))

    async def WatchKvEvents(  # type: ignore[override]
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> None:
        self._validator.check(request)
        await self._kv_events.WatchKvEvents(request, context)


def _log_change(what: str) -> None:
    _log.info("by tenant %s: %s", current_principal.get().tenant, what[:_MAX_LOGGED])
