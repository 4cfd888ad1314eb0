"""The event loop of programs that handle many messages."""

import asyncio
import gc
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, at half the cost a message, where it is installed; else None, which means asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def calm_collector() -> None:
    """Has Python's cycle collector look at less, and less often.

    A step of 256 streams makes thousands of short-lived objects without cycles; by default the collector takes an
    eighth of the loop's time to find that out.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)
