"""The preparation of a request: what it needs of the service, its time limit, its end if it ends before the engine has
it, and changes until then."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import (
    Change,
    EngineFinishReason,
    Request,
    RequestFinished,
    RequestTimings,
    TokenUsage,
)
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.idempotency import IdempotencyKeys
from penstock.service.requests.open_prompt import OpenPromptConfig
from penstock.service.telemetry.tracing import Telemetry


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts of the service that every request needs."""

    engine: Engine
    request_builder: RequestBuilder
    telemetry: Telemetry
    conversations: ContextStore
    open_prompts: OpenPromptConfig
    idempotency_keys: IdempotencyKeys


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


def requested_change(update: pb.GenerationUpdate) -> Change:
    """Returns the change that an update requests. The deadline counts from now."""
    has = update.HasField
    return Change(
        priority=update.priority if has("priority") else None,
        deadline=time.monotonic() + update.timeout_ms / 1000 if has("timeout_ms") else None,
        max_tokens=update.max_tokens if has("max_tokens") else None,
    )
