"""The listener of the administration: a gRPC server of its own, so that callers' networks need not reach it."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.service.admin import AdminService
from penstock.service.health import Health
from penstock.service.listen import Address
from penstock.service.listener import Listener
from penstock.service.transport import new_server
from penstock.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_MAX_STREAMS = 1024
_LAST_WORDS_S = 0.1
"""How long what watches has to hear of the end."""


class AdminListener:
    """Up as long as the service, draining included."""

    def __init__(
        self,
        address: Address,
        service: AdminService,
        health: Health,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self._service = service
        self._health = health
        self._interceptors = interceptors
        self._listener = Listener(address, self._new_server, is_private=True)

    def bind(self) -> str:
        """Returns the address with the port that was bound; a Unix socket is this user's alone. Raises ListenError."""
        return self._listener.bind()

    async def start(self) -> None:
        """Answers from here on."""
        await self._listener.start()

    async def stop(self) -> None:
        """Ends what is on it."""
        self._service.close()
        await self._listener.stop(_LAST_WORDS_S)

    def _new_server(self) -> grpc.aio.Server:
        server = new_server(self._interceptors, _MAX_STREAMS)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)  # type: ignore[no-untyped-call]
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((ADMIN_SERVICE, health_name, reflection.SERVICE_NAME), server)
        return server
