"""The seam between the scheduler's loop and whatever computes. Knows neither processes nor tensors."""

from collections.abc import AsyncIterator
from typing import Protocol

from penstock.scheduler.plan import StepPlan, StepResult, WorkerFacts

MAX_PLANS_IN_FLIGHT = 2
"""One computes, one waits: the worker never waits for Python, and a token in flight is never two steps old."""


class ExecutorError(Exception):
    """The executor could not start, or what it ran on is gone. The text says what, and a remedy where one is known."""

    def __init__(self, message: str, blames_step: bool = False) -> None:
        """``blames_step``: the worker ended by itself, so the step that it was in may be why; otherwise somebody else
        ended it."""
        super().__init__(message)
        self.blames_step = blames_step


class Executor(Protocol):
    """Runs plans strictly in order. At most ``MAX_PLANS_IN_FLIGHT`` are unanswered.

    When its worker is gone it is started again: ``stop``, then ``start``, then ``results`` anew.
    """

    async def start(self) -> WorkerFacts:
        """Loads the model. A restart gives the same facts. Raises ExecutorError."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands over a plan without waiting. Raises ExecutorError if the worker is known to be gone."""
        ...

    def results(self) -> AsyncIterator[StepResult]:
        """Answers in the order of the plans, until the worker is gone: then raises ExecutorError, after the last whole
        answer. Ends without an error after ``stop``."""
        ...

    def kill(self, why: str) -> None:
        """Ends a worker that no longer makes progress, at once: ``results`` raises an ExecutorError that says ``why``
        and blames the step. Nothing where none runs."""
        ...

    async def stop(self) -> None:
        """Ends the worker and waits for it; safe to call twice, and at any time."""
        ...
