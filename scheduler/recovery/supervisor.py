"""Starts an executor's workers, one after the other, and decides when to give up. It does not know requests."""

import asyncio
import logging
import time

from penstock.scheduler.config import RETRY_AFTER_MS
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.recovery.restarts import RestartBudget, WorkerFailure
from penstock.scheduler.worker_config import WorkerFacts

logger = logging.getLogger(__name__)


class WorkerSupervisor:
    """Starts a worker, and replaces it."""

    def __init__(self, executor: Executor, first_delay_s: float) -> None:
        self._executor = executor
        self.restarts = RestartBudget(first_delay_s)
        self._load_s = 0.0
        """The time that the last worker took to start."""
        self._died_at = 0.0

    @property
    def retry_ms(self) -> int:
        """The time until a replacement is likely to run."""
        left_s = self._load_s - (time.monotonic() - self._died_at)
        return max(RETRY_AFTER_MS, round(1000 * left_s))

    async def start(self) -> WorkerFacts:
        """Starts a worker. Raises ExecutorError."""
        began = time.monotonic()
        facts = await self._executor.start()
        self._load_s = time.monotonic() - began
        return facts

    def died(self, error: ExecutorError, *, in_a_step: bool) -> None:
        self._died_at = time.monotonic()
        self.restarts.died(WorkerFailure.IN_A_STEP if in_a_step else _failure(error))

    async def replace(self, error: ExecutorError) -> ExecutorError | None:
        """Replaces a worker that died with ``error``; returns the last error if no worker can be started."""
        while not self.restarts.is_hopeless:
            await self._executor.stop()
            await asyncio.sleep(self.restarts.delay_s)
            try:
                await self.start()
            except ExecutorError as failure:
                logger.error("another worker did not start: %s", failure)
                self.restarts.failed(_failure(failure))
                error = failure
                continue
            self.restarts.succeeded()
            return None
        return error


def _failure(error: ExecutorError) -> WorkerFailure:
    return WorkerFailure.BY_ITSELF if error.blames_step else WorkerFailure.KILLED
