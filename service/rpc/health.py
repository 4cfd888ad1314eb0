"""grpc.health.v1: ``""`` and every service say whether requests are taken, ``penstock.live`` whether the process lives.

Written anew because a change must reach every watcher at once, whatever another watcher does: grpcio's own servicer
forgets its other watchers when one leaves, and lets one that does not read hold up the change.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.service.errors import Reason, ServiceError
from penstock.service.transport.call_end import write

LIVENESS = "penstock.live"
_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Readiness and liveness."""

    def __init__(self, services: Iterable[str]) -> None:
        """``services``: full names of what is served. Not ready at first."""
        self._readiness_of = {"", *services}
        self._ready = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Takes effect at once, and wakes every watcher."""
        if ready == self._ready:
            return
        self._ready = ready
        self._tell()

    def close(self) -> None:
        """Ends what watches: the service goes down."""
        self._closed = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a service that is not served here."""
        status = self._status_of(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            raise ServiceError(Reason.UNKNOWN_SERVICE)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """The status now and whenever it changes, until the caller leaves."""
        await context.send_initial_metadata(())
        last = None
        while True:
            changed = self._changed
            status = self._status_of(request.service)
            if status != last:
                await write(context, health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._closed:
                raise ServiceError(Reason.SHUTDOWN, "the service is going down")
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service == LIVENESS:
            return _Status.SERVING
        if service not in self._readiness_of:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._ready else _Status.NOT_SERVING
