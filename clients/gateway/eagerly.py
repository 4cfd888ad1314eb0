"""Coroutines that are run at once, as far as they go without waiting."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs it in the caller's turn of the event loop; returns the task that has the rest, if it has to wait. Where that
    is rare it saves a task and a turn, as Python 3.12's ``eager_start`` does. The coroutine must not ask which task it
    runs in, as ``asyncio.timeout`` does."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.create_task(_rest(coroutine, awaited))


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, None], awaited: object) -> Generator[object, Any, None]:
    """The task that runs this waits for what ``coroutine`` awaits already."""
    yield awaited
    yield from coroutine
