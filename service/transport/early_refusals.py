"""Refuses calls before grpc.aio does anything with them: calls of methods that do not exist, and calls with too much
metadata.

If no method has a call's path, gRPC decodes the path as UTF-8 in the loop that accepts calls. A path that is not UTF-8
ends that loop, and the service accepts no more calls: any client could stop it. gRPC's own limit on metadata applies
only after the client has acknowledged it. Before, a client may send 16 MiB per call, which grpc.aio keeps in a
reference cycle even if an interceptor refuses the call.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from penstock.service.auth.identity import Metadata
from penstock.service.errors import Reason, ServiceError, status_code, to_status, trailers
from penstock.service.transport.call_end import abort
from penstock.service.transport.request_id import new_request_id

_log = logging.getLogger(__name__)

REFUSE_TIMEOUT_S = 5.0
"""How long a client that reads nothing can delay the refusal."""
MAX_METADATA_BYTES = 16 << 10
"""Limit on a call's metadata, counted as in HTTP/2, with 32 more bytes for each header."""
_HEADER_BYTES = 32
CUT_METADATA_BYTES = 4 * MAX_METADATA_BYTES
"""A client that sends more is disconnected: its next call could have as much, and all others wait while gRPC reads
it."""

CALLS_AT_ONCE = 8
"""Number of calls of a method that gRPC may deliver ahead."""

Cut = Callable[[str], None]
Trailing = Callable[[], Metadata]


def refuse_early(server: grpc.aio.Server, cut: Cut, trailing: Trailing, *arguments: Any) -> None:
    """Makes a new server refuse such calls. ``cut`` takes gRPC's name of a client and closes its connection.
    ``trailing`` returns trailing metadata for the refusals. ``arguments`` are those of gRPC's own server: the loop, a
    pool, handlers, interceptors, options and a limit."""
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        return  # an older gRPC, which reads paths elsewhere and does not separate known calls from others
    try:
        server._server = _Core(cut, trailing, *arguments)  # type: ignore[attr-defined]  # noqa: SLF001
    except TypeError:
        # The failed object will release a reference to gRPC's poller that it never took. This adds one, so that the
        # server keeps its own.
        cygrpc.init_grpc_aio()
        _log.warning(
            "grpcio %s creates servers in an unknown way: any client can stop the service with a call whose path is "
            "not UTF-8; use grpcio 1.85",
            grpc.__version__,
        )


class _Line:
    """The next calls of a method, in order of arrival."""

    def __init__(self) -> None:
        self.accepting: set[asyncio.Task[Any]] = set()
        """Tasks that accept one call each."""
        self.accepted: deque[Any] = deque()
        """Calls that grpc.aio has not requested yet."""
        self.wanted: asyncio.Future[Any] | None = None
        """The future of the next call, if grpc.aio waits for one."""

    def hand_over(self, task: "asyncio.Task[Any]") -> None:
        """Delivers a task's call or error. Drops an error if grpc.aio does not wait: the server has stopped."""
        self.accepting.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self.wanted is None or self.wanted.done():
            if error is None:
                self.accepted.append(task.result())
        elif error is None:
            self.wanted.set_result(task.result())
        elif task.cancelled():
            self.wanted.cancel()
        else:
            self.wanted.set_exception(error)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """The core of a ``grpc.aio`` server. All served methods are registered with it by their paths."""

    def __init__(self, cut: Cut, trailing: Trailing, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cut = cut
        self._trailing = trailing
        self._refusals: set[asyncio.Task[None]] = set()
        self._lines: dict[bytes, _Line] = {}
        """The lines by method."""

    async def _request_registered_call(self, method: bytes) -> Any:
        """Returns a method's next call with metadata within the limit. Raises what gRPC raises when the server
        stops."""
        while True:
            state = await super()._request_registered_call(method)
            context, num_bytes = _inspect(state)
            if num_bytes <= MAX_METADATA_BYTES:
                return state
            self._refuse(context, num_bytes)
            del state, context  # or they would last until the next call

    def _make_request_call_future(self, method: bytes | None) -> Any:
        """Returns a future for a method's next call. By default, grpc.aio only requests the next call when it has
        started the previous one, several iterations of the event loop later. Bursts then wait, and gRPC refuses some
        calls when more than 1,000 wait."""
        if method is None:
            return super()._make_request_call_future(method)
        line = self._lines.setdefault(method, _Line())
        wanted = asyncio.get_running_loop().create_future()
        if line.accepted:
            wanted.set_result(line.accepted.popleft())
        else:
            line.wanted = wanted
        while len(line.accepting) + len(line.accepted) < CALLS_AT_ONCE:
            task = super()._make_request_call_future(method)
            line.accepting.add(task)
            task.add_done_callback(line.hand_over)
        return wanted

    async def shutdown(self, grace: float | None) -> None:
        """Stops the server, and waits until it accepts no more calls."""
        await super().shutdown(grace)
        if accepting := [task for line in self._lines.values() for task in line.accepting]:
            await asyncio.wait(accepting, timeout=REFUSE_TIMEOUT_S)

    async def _request_call(self) -> Any:
        """Refuses calls of unknown methods. Never returns; raises what gRPC raises when the server stops."""
        while True:
            self._refuse(*_inspect(await super()._request_call()))

    def _refuse(self, context: Any, num_bytes: int) -> None:
        if num_bytes > CUT_METADATA_BYTES:
            self._cut(context.peer())
            return  # the call ends, since nothing refers to it
        refusal = asyncio.create_task(_abort(context, num_bytes > MAX_METADATA_BYTES, self._trailing()))
        self._refusals.add(refusal)
        refusal.add_done_callback(self._refusals.discard)


def _inspect(state: Any) -> tuple[Any, int]:
    """Returns a call and the size of its metadata."""
    context = cygrpc._ServicerContext(state, None, None, asyncio.get_running_loop())  # noqa: SLF001
    metadata: Metadata = context.invocation_metadata()
    return context, sum([len(name) + len(value) + _HEADER_BYTES for name, value in metadata])


async def _abort(context: Any, has_too_much: bool, trailing: Metadata) -> None:
    code, message = grpc.StatusCode.UNIMPLEMENTED, "no service here has such a method"
    if has_too_much:
        status = to_status(ServiceError(Reason.METADATA_TOO_LARGE), new_request_id())
        code, message, trailing = status_code(status), status.message, (*trailers(status), *trailing)
    with contextlib.suppress(grpc.aio.BaseError, TimeoutError):  # ``abort`` always raises; the client may be gone
        async with asyncio.timeout(REFUSE_TIMEOUT_S):
            await abort(context, code, message, trailing)
