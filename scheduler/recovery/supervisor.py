"""An executor's workers, one after the other: starts them, and says when to give up. Knows no request."""

import asyncio
import logging
import time

from penstock.scheduler.config import RETRY_AFTER_MS
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.plan import WorkerFacts
from penstock.scheduler.recovery.restarts import RestartBudget, WorkerFailure

logger = logging.getLogger(__name__)


class WorkerSupervisor:
    """Starts a worker, and others in its place."""

    def __init__(self, executor: Executor, first_delay_s: float) -> None:
        self._executor = executor
        self._restarts = RestartBudget(first_delay_s)
        self._load_s = 0.0
        """What the last worker took to start."""
        self._died_at = 0.0

    @property
    def num_replaced(self) -> int:
        """Since the start."""
        return self._restarts.total

    @property
    def retry_ms(self) -> int:
        """While one is replaced: when another is likely to run."""
        left_s = self._load_s - (time.monotonic() - self._died_at)
        return max(RETRY_AFTER_MS, round(1000 * left_s))

    async def start(self) -> WorkerFacts:
        """Raises ExecutorError."""
        began = time.monotonic()
        facts = await self._executor.start()
        self._load_s = time.monotonic() - began
        return facts

    def answered(self) -> None:
        """The worker has answered a step."""
        self._restarts.answered()

    def died(self, error: ExecutorError, *, in_a_step: bool) -> None:
        """The worker is gone."""
        self._died_at = time.monotonic()
        self._restarts.died(WorkerFailure.IN_A_STEP if in_a_step else _failure(error))

    async def replace(self, error: ExecutorError) -> ExecutorError | None:
        """Starts another one in the place of one that died by ``error``; returns the last error if none can be had."""
        while not self._restarts.is_hopeless:
            await self._executor.stop()
            await asyncio.sleep(self._restarts.delay_s)
            try:
                await self.start()
            except ExecutorError as failure:
                logger.error("another worker did not start: %s", failure)
                self._restarts.failed(_failure(failure))
                error = failure
                continue
            self._restarts.succeeded()
            return None
        return error


def _failure(error: ExecutorError) -> WorkerFailure:
    return WorkerFailure.BY_ITSELF if error.blames_step else WorkerFailure.KILLED
