"""Orders requests by rank, the lowest first; the highest is preempted first. It does not know blocks.

Within a priority, targets for the first token take precedence over arrival. A rank does not change while its request is
live. Under ``fair``, the tenants' turns come before the rank, and change in every step with what each tenant was
served.
"""

from enum import Enum
from typing import NamedTuple

from penstock.scheduler.request import Request

Rank = tuple[float, float, int, int]
"""A unique sort key: (the policy's value, when the first token is due, the place by arrival, sequence)."""


class Place(NamedTuple):
    """The place of a request among those of the same rank by policy."""

    entered_at: float
    """When it entered the queue, or would have entered it: it may have taken an earlier place."""
    number: int
    """Unique numbers: even ones by arrival, odd ones for an earlier place."""


PATIENCE_S = 60.0
"""A request without a target for its first token is ranked as if it had one this long after it entered the queue, and
under ``deadline`` one without a deadline as if it had one this long after its arrival, so that it does not starve."""
WARM_UP_PATIENCE_S = 120.0
"""The same for warm-ups, so that requests go first."""


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


def rank_of(policy: Policy, request: Request, predicted_s: float, place: Place, choice: int) -> Rank:
    """Returns the rank of one sequence of a request at ``place``, which is predicted to take ``predicted_s`` once it
    runs."""
    target = request.first_token_target
    patience_s = WARM_UP_PATIENCE_S if request.is_warm_up else PATIENCE_S
    due = place.entered_at + patience_s if target is None else target
    value = 0.0
    if policy is Policy.PRIORITY:
        value = request.priority
    elif policy is Policy.DEADLINE:
        # All slacks shrink equally with time, so the latest time to begin gives the same order, and stays constant.
        value = (request.arrival + PATIENCE_S if request.deadline is None else request.deadline) - predicted_s
        value = value if target is None else min(value, target)
    return (value, due, place.number, choice)


def may_follow(rank: Rank, running: Rank, target: float | None) -> bool:
    """Returns whether a sequence with a ``target`` for its first token may wait for what a running one computes. It
    might wait long for the turn of one that comes after it."""
    num_compared = 1 if target is None else 2
    return running[:num_compared] <= rank[:num_compared]
