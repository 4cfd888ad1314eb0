"""Timers that end requests at their deadlines."""

import asyncio
import time
from collections.abc import Callable


class DeadlineTimers:
    """One timer for each live request with a deadline."""

    def __init__(self, on_passed: Callable[[str], object]) -> None:
        """``on_passed`` is called with the id of a request whose deadline has passed."""
        self._on_passed = on_passed
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def set(self, request_id: str, deadline: float) -> None:
        """Starts the request's timer, in place of an earlier one. ``deadline`` is a time by ``time.monotonic()``."""
        self.drop(request_id)
        # Both clocks are CLOCK_MONOTONIC, but a loop may round its own.
        delay = max(0.0, deadline - time.monotonic())
        self._timers[request_id] = asyncio.get_running_loop().call_later(delay, self._on_passed, request_id)

    def drop(self, request_id: str) -> None:
        """Stops the request's timer, if it has one."""
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
