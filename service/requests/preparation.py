"""The preparation of a request: its origin, its time limit, and its end if it never reaches the engine."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from penstock.scheduler.request import (
    EngineFinishReason,
    Request,
    RequestFinished,
    RequestTimings,
    TokenUsage,
)
from penstock.service.errors import Reason, ServiceError


@dataclass(frozen=True, slots=True)
class Origin:
    """A request's id and tenant, and its times by ``time.monotonic()``."""

    request_id: str
    tenant: str
    arrival: float
    deadline: float | None = None
    committed: float = 0.0
    """The time at which its open prompt was committed, if it was open."""


@asynccontextmanager
async def preparation_limit(deadline: float | None, aim: str) -> AsyncIterator[asyncio.Timeout]:
    """Ends the preparation of a request at its ``deadline`` by ``time.monotonic()``. Raises ServiceError DEADLINE."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()) as limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise ServiceError(Reason.DEADLINE, f"the deadline passed before {aim}") from None


def unqueued_end(
    reason: EngineFinishReason, request: Request | None, arrival: float, message: str = ""
) -> RequestFinished:
    """Returns the end of a request that the engine does not have. ``arrival`` is by ``time.monotonic()``."""
    usage = TokenUsage(prompt_tokens=0 if request is None else request.num_prompt_tokens)
    total_us = round((time.monotonic() - arrival) * 1e6)
    return RequestFinished(reason, usage, RequestTimings(total_us=total_us), message)
