"""Changes to a live request that an update requests."""

import time
from dataclasses import replace

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import Change, Refused, Request
from penstock.service.errors import ServiceError, from_refusal
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.live.injection import Refuse


def requested_change(update: pb.GenerationUpdate) -> Change:
    """Returns the change that an update requests. The deadline counts from now."""
    has = update.HasField
    return Change(
        priority=update.priority if has("priority") else None,
        deadline=time.monotonic() + update.timeout_ms / 1000 if has("timeout_ms") else None,
        max_tokens=update.max_tokens if has("max_tokens") else None,
    )


def apply_change(
    engine: Engine, request_builder: RequestBuilder, request: Request, change: Change, refuse: Refuse
) -> None:
    """Changes a queued request. If the change is refused, calls ``refuse``, and the request continues unchanged."""
    try:
        if change.max_tokens is not None:
            change = replace(change, max_tokens=request_builder.cut_max_tokens(request, change.max_tokens))
        engine.update(request.request_id, change)
    except ServiceError as error:
        refuse(error)
    except Refused as error:
        refuse(from_refusal(error))
