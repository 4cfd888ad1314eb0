"""Whether a service is serving, as grpc.health.v1 tells; the bare install has no stubs of that."""

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
    """What the service says. Raises grpc.aio.AioRpcError if it does not answer within ``timeout`` seconds; with
    ``wait_for_ready`` a connection is waited for as long."""
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
    return await check(b"", timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready) == _SERVING
