"""Waits for conditions, and has a clock that tests advance. Sets no limit of its own: pytest's timeout ends a test that
hangs and prints its stacks, and a shorter limit fails whenever other programs use the cores."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

_PAUSE_S = 0.002


async def until(condition: Callable[..., Any]) -> Any:
    """Waits until ``condition()`` is true while the event loop runs, and returns its value."""
    while not (found := condition()):  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(_PAUSE_S)
    return found


async def turns(number: int = 20) -> None:
    """Lets the event loop run its ready callbacks this many times."""
    for _ in range(number):
        await asyncio.sleep(0)


def wait_until(condition: Callable[..., Any]) -> Any:
    """Waits until ``condition()`` is true, and returns its value; for tests without an event loop."""
    while not (found := condition()):
        time.sleep(_PAUSE_S)
    return found


class ManualClock:
    """A clock that stands still until a test advances it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now
