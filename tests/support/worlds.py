"""How tests of the scheduler drive a ``World``."""

from collections.abc import Callable, Iterator
from typing import Any

from penstock.scheduler.plan import StepPlan
from penstock.scheduler.request import Request


def run(
    world: Any, new_request: Callable[..., Request], name: str, token_ids: list[int], **fields: Any
) -> tuple[Any, list[StepPlan]]:
    """Runs a request from beginning to end; returns what its sink received, with the plans that were made for it."""
    received, plans = world.add(new_request(name, token_ids, **fields)), []
    assert received is not None, "the request is refused"
    while received.finished is None:
        if world.schedule():
            plans.append(world.plans[-1])
        world.answer()
        world.check()
    world.drain()
    return received, plans


def turns(world: Any) -> Iterator[StepPlan]:
    """Runs all requests to their ends with as many plans in flight as there may be; yields each plan as it is made."""
    while world.alive():
        while world.schedule():
            world.check()
            yield world.plans[-1]
        world.answer()
        world.check()
    world.drain()
