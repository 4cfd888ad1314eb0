"""The interface between the scheduler's loop and the workers. It does not depend on processes or tensors."""

from collections.abc import AsyncIterator
from typing import Protocol

from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, StepPlan, StepResult
from penstock.scheduler.worker_config import WorkerFacts

MAX_PLANS_IN_FLIGHT = 2
"""One plan is computed while one waits: the worker never waits for Python, and a token in flight is never two steps
old. A model that is divided into stages has one more for each further stage."""


class ExecutorError(Exception):
    """The executor could not start, or its worker is gone. The message contains the reason, and a remedy where one is
    known."""

    def __init__(self, message: str, blames_step: bool = False) -> None:
        """``blames_step``: the worker ended by itself, so the step that it was computing may be the cause. Otherwise
        something else ended it."""
        super().__init__(message)
        self.blames_step = blames_step


class Executor(Protocol):
    """Runs plans strictly in order. At most ``MAX_PLANS_IN_FLIGHT`` are without a result, or more with several stages.

    After its worker is gone, it is restarted: ``stop``, then ``start``, then ``results`` again.
    """

    async def start(self) -> WorkerFacts:
        """Loads the model. A restart gives the same facts. Raises ExecutorError."""

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan without waiting. Raises ExecutorError if the worker is known to be gone."""

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """Loads a LoRA adapter while plans go on. Returns the answer. Raises ExecutorError if the worker is gone, or
        ends before it answers."""

    def results(self) -> AsyncIterator[StepResult]:
        """Yields results in the order of the plans until the worker is gone; then raises ExecutorError, after the last
        complete result. Ends without an error after ``stop``."""

    def kill(self, why: str) -> None:
        """Ends at once a worker that no longer makes progress: ``results`` raises an ExecutorError with the message
        ``why`` that blames the step. Does nothing if no worker runs."""

    async def stop(self) -> None:
        """Ends the worker and waits for it; safe to call twice, and at any time."""
