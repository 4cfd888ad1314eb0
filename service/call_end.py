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

from penstock.clients.error_frames import release_frames
from penstock.service.errors import Reason, ServiceError

WRITE_PATIENCE_S = 60.0
"""How long a client may take to read one message of a stream, or a whole answer."""
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


def end_call(handler: "asyncio.Task[Any]") -> None:
    """Ends the call that the task ``handler`` answers, whatever is still to be sent."""
    handler.cancel()
    for task in asyncio.all_tasks():
        if task.get_name() == _OUTER_TASK and handler in _known_to(task):
            task.cancel()
            return


def _known_to(task: "asyncio.Task[Any]") -> Sequence[object]:
    """Returns what the coroutine of gRPC's task has in its variables, which are not in a Python frame."""
    with contextlib.suppress(TypeError):
        return gc.get_referents(*gc.get_referents(task.get_coro()))
    return ()
