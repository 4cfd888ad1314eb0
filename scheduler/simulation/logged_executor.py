"""Writes a step log: an executor that passes everything on to another one, and a file with a thread of its own."""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.executor import Executor
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, StepPlan, StepResult
from penstock.scheduler.simulation.step_log import FORMAT, LoggedLimits, StepLogHeader, StepTimes, logged_step
from penstock.scheduler.worker_config import WorkerFacts

MAX_WAITING = 10_000
"""The limit of steps that are not written yet; further ones are left out."""
_FLUSH_S = 2.0

_log = logging.getLogger(__name__)


class StepLogFile:
    """A file of JSON lines. ``write`` never waits for the disk: a thread encodes and writes."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and replaces what it contains. Raises OSError."""
        self._file = path.open("wb")
        self._path = path
        self._lines: queue.Queue[msgspec.Struct] = queue.Queue(MAX_WAITING)
        self._num_lost = 0
        self._has_failed = False
        threading.Thread(target=self._run, name="step log", daemon=True).start()

    def write(self, line: msgspec.Struct) -> None:
        """Queues a line. If the disk is too slow, it is left out."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_lost += 1
            if self._num_lost == 1:
                _log.warning("--step-log %s: the disk is too slow; steps are missing in it", self._path)

    def flush(self) -> None:
        """Waits until all is written, but not for long."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _FLUSH_S)

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        while True:
            data = encoder.encode(self._lines.get()) + b"\n"
            try:
                if not self._has_failed:
                    self._file.write(data)
                    if self._lines.empty():
                        self._file.flush()
            except (OSError, ValueError) as error:
                self._has_failed = True
                reason = getattr(error, "strerror", None) or error
                _log.warning("--step-log %s: cannot be written (%s); no more steps are logged", self._path, reason)
            finally:
                self._lines.task_done()


class LoggedExecutor:
    """An ``Executor`` that logs the steps of another one."""

    def __init__(
        self, executor: Executor, file: StepLogFile, config: SchedulerConfig, version: str, max_drafts: int = 0
    ) -> None:
        """``version`` is that of penstock, ``config`` that of the scheduler, and ``max_drafts`` the maximum number of
        drafts of a row in a step."""
        self._executor = executor
        self._file = file
        self._config = config
        self._version = version
        self._max_drafts = max_drafts
        self._began = time.monotonic()
        self._has_header = False
        self._plans: deque[tuple[StepPlan, float]] = deque()
        """Plans without a result, and when they were sent."""

    async def start(self) -> WorkerFacts:
        """Starts the other executor. The log goes on after a restart."""
        facts = await self._executor.start()
        self._plans.clear()
        if not self._has_header:
            self._has_header = True
            limits = LoggedLimits.of(self._config)
            header = StepLogHeader(
                step_log=FORMAT, penstock=self._version, limits=limits, facts=facts, max_drafts=self._max_drafts
            )
            self._file.write(header)
        return facts

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        self._plans.append((plan, time.monotonic()))

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        return await self._executor.load_adapter(load)

    async def results(self) -> AsyncIterator[StepResult]:
        """Yields the other executor's results. What happens until the next one is needed is the time to handle it."""
        async for result in self._executor.results():
            answered = time.monotonic()
            plan, submitted = self._plans.popleft()
            yield result
            if result.computed_us:  # otherwise all of its rows waited for masks
                times = (when - self._began for when in (submitted, answered, time.monotonic()))
                self._file.write(logged_step(plan, result, StepTimes(*times)))

    def kill(self, why: str) -> None:
        self._executor.kill(why)

    async def stop(self) -> None:
        """Stops the other executor, and writes what is left."""
        await self._executor.stop()
        await asyncio.to_thread(self._file.flush)
