"""The event loop of programs that handle many messages."""

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, at half the cost a message, where it is installed; else None, which means asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
