"""Queries grpc.health.v1 without its stubs, which the bare install does not have."""

import grpc

LIVENESS = "penstock.live"
"""The service that is serving while the process is alive, also while it is not ready."""
_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


async def is_serving(
    channel: grpc.aio.Channel,
    metadata: tuple[tuple[str, str], ...] = (),
    *,
    timeout: float,  # noqa: ASYNC109 - gRPC keeps it
    wait_for_ready: bool = False,
    service: str = "",
) -> bool:
    """Whether the service is serving. Raises grpc.aio.AioRpcError if it does not respond within ``timeout`` seconds;
    with ``wait_for_ready``, that time includes waiting for a connection. ``service`` is a name in grpc.health.v1, of at
    most 127 bytes."""
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
    request = b"\x0a%c%b" % (len(service), service.encode()) if service else b""  # HealthCheckRequest{service}
    return await check(request, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready) == _SERVING
