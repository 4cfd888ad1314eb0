"""The requests of a stream that another one replaces when it enters the queue."""

from collections.abc import Iterator
from typing import Protocol

from penstock.scheduler.request import EngineFinishReason
from penstock.service.errors import invalid


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
