"""In which order requests run: a rank each, the lowest first; the highest loses its blocks first. Knows no blocks."""

from collections.abc import Callable
from enum import Enum

from penstock.scheduler.request import Request

Rank = tuple[int, int, int]
"""Unique, and comparable: (what the policy says, number of arrival, choice)."""


class Policy(Enum):
    """How ``--scheduling-policy`` orders requests."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"
    """Lower ``priority`` first; among equals, first come, first served."""


_PRECEDENCE: dict[Policy, Callable[[Request], int]] = {
    Policy.FCFS: lambda _: 0,
    Policy.PRIORITY: lambda request: request.priority,
}


def rank_of(policy: Policy, request: Request, arrival_number: int, choice: int) -> Rank:
    """The rank of one choice of a request that arrived as number ``arrival_number``."""
    return (_PRECEDENCE[policy](request), arrival_number, choice)
