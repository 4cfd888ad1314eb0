"""Ends calls: with a status, without leaving memory behind in gRPC; when a write takes too long; and when the client
has stopped reading.

grpc.aio cannot cancel a call on the server. A call ends when nothing in Python refers to it any more: then it is
cancelled, unsent messages are dropped, and the client gets CANCELLED. The newest call may last longer, since gRPC's
loop that accepts calls refers to it until the next one arrives.
"""

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc

from penstock.clients.host.error_frames import release_frames
from penstock.service.errors import Reason, ServiceError

WRITE_PATIENCE_S = 60.0
"""How long a client may take to read one message of a stream, or a whole response."""
GATHER_S = 0.05
"""How long a call waits for others to end in the same batch."""
AT_ONCE = 100
"""Number of calls that end in one iteration of the event loop."""
_OUTER_TASK = "rpc_task"
"""gRPC's name for the task that waits for the end of a call, and keeps it alive."""


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]",
    code: grpc.StatusCode,
    message: str,
    trailers: Sequence[tuple[str, str | bytes]] = (),
) -> NoReturn:
    """Ends the call with a status; raises what ``context.abort`` raises."""
    try:
        await context.abort(code, message, tuple(trailers))
    except grpc.aio.AbortError as error:
        # gRPC keeps the error in the call's state, and the frames in its traceback refer to the call. This cycle would
        # hold the call's metadata, and all messages read, until the garbage collector runs.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _, error=error: release_frames(error))  # type: ignore[misc]
        raise
    raise AssertionError("abort always raises")


async def write(context: "grpc.aio.ServicerContext[Any, Any]", message: Any) -> None:
    """Writes a message of a stream. The initial metadata must have been sent: otherwise a blocked message would block
    it too, and then the status. Raises ServiceError READER_TOO_SLOW if the client does not read in time."""
    try:
        async with asyncio.timeout(WRITE_PATIENCE_S):
            await context.write(message)
    except TimeoutError:
        raise ServiceError(Reason.READER_TOO_SLOW) from None


class CallEnder:
    """Ends calls in batches, since finding them means scanning all tasks of the loop."""

    def __init__(self) -> None:
        self._handlers: set[asyncio.Task[Any]] = set()

    def end(self, handler: "asyncio.Task[Any]") -> None:
        """Ends the call of the task ``handler`` soon, and drops unsent messages."""
        if not self._handlers:
            asyncio.get_running_loop().call_later(GATHER_S, self._end)
        self._handlers.add(handler)

    def _end(self) -> None:
        handlers, self._handlers = self._handlers, set()
        outer = [
            (handler, task)
            for task in asyncio.all_tasks()
            if task.get_name() == _OUTER_TASK
            for handler in _known_to(task)
            if isinstance(handler, asyncio.Task) and handler in handlers
        ]
        self._cancel_some(outer)

    def _cancel_some(self, calls: "list[tuple[asyncio.Task[Any], asyncio.Task[Any]]]") -> None:
        for _ in range(min(AT_ONCE, len(calls))):
            for task in calls.pop():
                task.cancel()
        if calls:
            asyncio.get_running_loop().call_soon(self._cancel_some, calls)


def _known_to(task: "asyncio.Task[Any]") -> Sequence[object]:
    """Returns the variables of the coroutine of gRPC's task, which has no Python frame."""
    with contextlib.suppress(TypeError):
        return gc.get_referents(*gc.get_referents(task.get_coro()))
    return ()
