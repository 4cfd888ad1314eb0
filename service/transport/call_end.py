"""Ends calls: with a status, without leaving memory behind in gRPC; when a write takes too long; and when the client
has stopped reading.

grpc.aio cannot cancel a call from the server's side. A call ends when nothing in Python refers to it any longer: then
it is cancelled, what waited to be sent is dropped, and the client gets CANCELLED. The newest call may last longer,
since gRPC's loop that accepts calls refers to it until the next one arrives.
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
"""How long a client may take to read one message of a stream, or a whole answer."""
GATHER_S = 0.05
"""How long a call waits for others that are to end with it."""
AT_ONCE = 100
"""Number of calls that end in one turn of the loop."""
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
        # gRPC keeps it in the state of the call, and its traceback has frames that know the call: a circle that would
        # hold the call's metadata, and all that was read, until the cycle collector runs.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _, error=error: release_frames(error))  # type: ignore[misc]
        raise
    raise AssertionError("abort always raises")


async def write(context: "grpc.aio.ServicerContext[Any, Any]", message: Any) -> None:
    """Writes a message of a stream. Its initial metadata must have been sent: in one operation with a message that is
    held up, it would keep the status back too. Raises ServiceError READER_TOO_SLOW where the client does not read in
    time."""
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
        """Ends the call that the task ``handler`` answers soon, whatever is still to be sent."""
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
    """Returns what the coroutine of gRPC's task has in its variables, which are not in a Python frame."""
    with contextlib.suppress(TypeError):
        return gc.get_referents(*gc.get_referents(task.get_coro()))
    return ()
