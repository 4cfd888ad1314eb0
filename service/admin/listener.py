"""The admin listener: a separate gRPC server, so that callers' networks need not reach it."""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE

from penstock.service.admin.operations import AdminService
from penstock.service.auth.tls import ServerTls
from penstock.service.config.addresses import Address
from penstock.service.rpc.health import Health
from penstock.service.rpc.reflection import add_reflection
from penstock.service.transport.connections import MAX_ADMIN_CONNECTIONS, Connections
from penstock.service.transport.early_refusals import Trailing
from penstock.service.transport.transport import bind, new_server, only_for_this_user
from penstock.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_MAX_STREAMS = 1024
_LAST_WORDS_S = 0.1
"""The time for subscribers to receive the final status."""


class AdminListener:
    """The admin listener, which is open for the service's lifetime, including while it drains."""

    def __init__(
        self,
        address: Address,
        service: AdminService,
        health: Health,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        tls: ServerTls | None,
        connections: Connections,
        trailing: Trailing,
    ) -> None:
        """``tls`` applies if other machines can reach the address; on loopback the tools need no certificates."""
        self._address = address
        self._tls = None if address.is_local else tls
        self._service = service
        self._connections = connections
        self._server = new_server(interceptors, _MAX_STREAMS, MAX_ADMIN_CONNECTIONS, connections.cut, trailing)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)  # type: ignore[no-untyped-call]
        add_reflection((ADMIN_SERVICE, HEALTH_SERVICE), self._server)

    async def start(self) -> str:
        """Starts to serve; returns the address with the bound port. Only this user can open a Unix socket. Raises
        ListenError."""
        with only_for_this_user():
            bound = bind(self._server, self._address, self._tls)
        self._connections.add_listener(Address.parse(bound), MAX_ADMIN_CONNECTIONS)
        await self._server.start()
        return bound

    async def stop(self) -> None:
        self._service.close()
        await self._server.stop(_LAST_WORDS_S)
        self._address.remove()
