"""Calls of methods that there are not: refused here, because grpc.aio does not survive all of them.

Where no method has a call's path, gRPC reads it as UTF-8 in the loop that accepts calls. A path that is none ends that
loop, and nothing listens any more: any client could end the service.
"""

import asyncio
import contextlib
import logging
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from penstock.service.call_end import abort

_log = logging.getLogger(__name__)

REFUSE_TIMEOUT_S = 5.0
"""A client that takes nothing holds nothing up for longer."""


def refuse_unknown_calls(server: grpc.aio.Server, *arguments: Any) -> None:
    """Changes a new server. ``arguments`` are those of gRPC's own: the loop, a pool, handlers, interceptors, options
    and a limit."""
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        return  # an older gRPC, which reads paths elsewhere; there is no other way to tell known calls from others
    try:
        server._server = _Core(*arguments)  # type: ignore[attr-defined]  # noqa: SLF001
    except TypeError:
        # What could not be made gives back a hold on gRPC's poller that it never took: without this, the server's own.
        cygrpc.init_grpc_aio()
        _log.warning(
            "grpcio %s makes its servers in a way of its own: any client can end the service, by a call whose path is "
            "no UTF-8; use grpcio 1.85",
            grpc.__version__,
        )


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """gRPC's server behind the one of ``grpc.aio``. Every method of ours is registered with it by its path."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refusals: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        """Waits for a call of no registered method. Never returns; raises what gRPC does when the server stops."""
        loop = asyncio.get_running_loop()
        while True:
            state = await super()._request_call()
            context = cygrpc._ServicerContext(state, None, None, loop)  # noqa: SLF001
            refusal = loop.create_task(_refuse(context))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(context: Any) -> None:
    with contextlib.suppress(grpc.aio.BaseError, TimeoutError):  # ``abort`` always raises; the client may be gone
        async with asyncio.timeout(REFUSE_TIMEOUT_S):
            await abort(context, grpc.StatusCode.UNIMPLEMENTED, "no service here has such a method")
