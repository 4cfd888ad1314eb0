"""Changes to a request before the engine has it, and the requests that it then replaces."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import penstock.v1 as pb
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import Change, EngineFinishReason, Refused, Request
from penstock.service.errors import ServiceError, from_refusal, invalid
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


class Replaceable(Protocol):
    """A request that another one of its stream may replace."""

    ref: int
    request_id: str
    tenant: str
    supersedes: "Replaceable | None"
    superseded_by: int

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to replace."""

    def cancel(self, reason: EngineFinishReason = ...) -> None:
        """Ends it."""


def replace_later(request: Replaceable, other: Replaceable | None) -> None:
    """Lets ``request`` replace ``other`` when it is accepted. Raises ServiceError if it may not."""
    if other is request:
        raise invalid("supersedes", "is the request's own ref; give that of an earlier one, or omit it")
    if other is not None:
        if other.tenant != request.tenant:
            raise invalid("supersedes", "that request is another tenant's; give the ref of one of the same tenant")
        other.supersedes = next(_superseded(other), None)  # skips those that ended, so that a chain stays short
        request.supersedes = other


def mark_superseded(request: Replaceable) -> list[Replaceable]:
    """Returns the live requests that ``request``, which is about to enter the queue, replaces: the one that it names,
    and then the ones that that one was to replace, but did not because it was not accepted. So only the last one can be
    in the queue. Their ends will name ``request``."""
    superseded = list(_superseded(request))
    for other in superseded:
        other.superseded_by = request.ref
    return superseded


def _superseded(request: Replaceable) -> Iterator[Replaceable]:
    other = request.supersedes
    while other is not None:
        if not other.has_ended:
            yield other
        other = other.supersedes
