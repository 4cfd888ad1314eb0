"""grpc.health.v1: the readiness of ``""`` and every service, and the liveness of the process as ``penstock.live``.

Replaces grpcio's servicer, because a change must reach every watcher at once, whatever another watcher does: grpcio's
drops its other watchers when one leaves, and a watcher that does not read delays the change for the rest.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients.health import LIVENESS
from penstock.service.errors import Reason, ServiceError
from penstock.service.transport.call_end import write

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Readiness and liveness."""

    def __init__(self, services: Iterable[str]) -> None:
        """``services`` are the full names of the services. Not ready at first."""
        self._readiness_of = {"", *services}
        self.is_ready = False
        """Whether the services accept requests. Changed by ``set_ready``."""
        self._closed = False
        self._changed = asyncio.Event()

    def set_ready(self, ready: bool) -> None:
        """Takes effect at once, and wakes every watcher."""
        if ready == self.is_ready:
            return
        self.is_ready = ready
        self._notify()

    def close(self) -> None:
        """Ends all watches, because the service shuts down."""
        self._closed = True
        self._notify()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Returns the current status. Fails with NOT_FOUND for an unknown service."""
        status = self._status_of(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            raise ServiceError(Reason.UNKNOWN_SERVICE)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Sends the current status, and each change of it, until the caller leaves."""
        await context.send_initial_metadata(())
        last = None
        while True:
            changed = self._changed
            status = self._status_of(request.service)
            if status != last:
                await write(context, health_pb2.HealthCheckResponse(status=status))
                last = status
            if self._closed:
                raise ServiceError(Reason.SHUTDOWN, "the service is shutting down")
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service == LIVENESS:
            return _Status.SERVING
        if service not in self._readiness_of:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self.is_ready else _Status.NOT_SERVING
