"""Orders requests by rank, the lowest first; the highest is preempted first. It does not know blocks.

A rank does not change while its request lives. Under ``fair``, the tenants' turns come before the rank, and change in
every step with what each tenant was served.
"""

from enum import Enum

from penstock.scheduler.request import Request

Rank = tuple[float, int, int]
"""A unique sort key: (the policy's value, the place by arrival, sequence)."""

PATIENCE_S = 60.0
"""Under ``deadline``, a request without a deadline is ranked as if it had one this long after its arrival."""


class Policy(Enum):
    """The values of ``--scheduling-policy``."""

    FCFS = "fcfs"
    """First come, first served; but a request whose prompt is retained goes before some that need more."""
    PRIORITY = "priority"
    """Lower ``priority`` first; among equals, first come, first served."""
    DEADLINE = "deadline"
    """Least slack first: the time that is left once the predicted work is done."""
    FAIR = "fair"
    """The tenant that was served least for its weight first; within a tenant, first come, first served."""


def rank_of(policy: Policy, request: Request, predicted_s: float, place: int, choice: int) -> Rank:
    """Returns the rank of one sequence of a request, which would take ``predicted_s`` if it ran at once. Among equals,
    the lower ``place`` goes first."""
    value = 0.0
    if policy is Policy.PRIORITY:
        value = request.priority
    elif policy is Policy.DEADLINE:
        # All slacks shrink equally with time, so the latest time to begin gives the same order, and stays constant.
        value = (request.arrival + PATIENCE_S if request.deadline is None else request.deadline) - predicted_s
    return (value, place, choice)
