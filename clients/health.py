"""Queries grpc.health.v1 without its stubs, which the bare install does not have."""

import grpc

_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


async def is_serving(
    channel: grpc.aio.Channel,
    metadata: tuple[tuple[str, str], ...] = (),
    *,
    timeout: float,  # noqa: ASYNC109 - gRPC keeps it
    wait_for_ready: bool = False,
) -> bool:
    """Whether the service is serving. Raises grpc.aio.AioRpcError if it does not respond within ``timeout`` seconds;
    with ``wait_for_ready``, that time includes waiting for a connection."""
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
    return await check(b"", timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready) == _SERVING
