"""Runs coroutines immediately up to the first wait."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def run_eagerly(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs a coroutine in the caller's turn of the event loop; if it has to wait, returns a task for the rest. If
    waiting is rare, this saves a task and a turn, like ``eager_start`` in Python 3.12. The coroutine must not use the
    current task, as ``asyncio.timeout`` does."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.create_task(_await_rest(coroutine, awaited))


@types.coroutine
def rest_of(coroutine: Coroutine[Any, Any, T], awaited: object) -> Generator[object, Any, T]:
    """Runs the rest of a coroutine that was begun by ``send(None)``, which returned ``awaited``."""
    return (yield from _rest(coroutine, awaited))


async def _await_rest(coroutine: Coroutine[Any, Any, None], awaited: object) -> None:
    """Runs the rest as a coroutine of the kind that tasks accept: since Python 3.12, they accept no generators."""
    await rest_of(coroutine, awaited)


def _rest(coroutine: Coroutine[Any, Any, T], awaited: object) -> Generator[object, Any, T]:
    try:
        yield awaited
    except BaseException as error:  # such as a cancellation, after which the coroutine may clean up
        try:
            awaited = coroutine.throw(error)
        except StopIteration as done:
            result: T = done.value
            return result
        return (yield from _rest(coroutine, awaited))
    return (yield from coroutine.__await__())
