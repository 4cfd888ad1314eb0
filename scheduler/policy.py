"""How requests are ordered: a rank each, the lowest first; the highest loses its blocks first. Knows no blocks.

A rank stands still while its request lives, but for one policy: under ``fair`` the tenants' turns are taken anew in
every step, by what each was served.
"""

from collections.abc import Callable
from enum import Enum

from penstock.scheduler.request import Request

Rank = tuple[float, int, int]
"""Unique, and comparable: (what the policy says, number of arrival, choice)."""

PATIENCE_S = 60.0
"""Under ``deadline``: a request that has none ranks as if it had one, so long after its arrival."""


class Policy(Enum):
    """How ``--scheduling-policy`` orders requests."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"
    """Lower ``priority`` first; among equals, first come, first served."""
    DEADLINE = "deadline"
    """Least slack first: the time that is left when the predicted work is done."""
    FAIR = "fair"
    """The tenant that was served least for its weight first; within a tenant, first come, first served."""


def _slack(request: Request, predicted_s: float) -> float:
    # All slacks shrink alike as time goes by, so the latest time to begin orders as they do, and stands still.
    deadline = request.arrival + PATIENCE_S if request.deadline is None else request.deadline
    return deadline - predicted_s


_PRECEDENCE: dict[Policy, Callable[[Request, float], float]] = {
    Policy.FCFS: lambda request, predicted_s: 0.0,
    Policy.PRIORITY: lambda request, predicted_s: request.priority,
    Policy.DEADLINE: _slack,
    Policy.FAIR: lambda request, predicted_s: 0.0,
}


def rank_of(policy: Policy, request: Request, predicted_s: float, arrival_number: int, choice: int) -> Rank:
    """The rank of one choice of a request that arrived as number ``arrival_number``, and that would take
    ``predicted_s`` if it ran at once."""
    return (_PRECEDENCE[policy](request, predicted_s), arrival_number, choice)
