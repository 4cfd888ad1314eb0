"""A rank's worker process on the host of an agent, and what the leader learns of it."""

import asyncio
import contextlib
import logging

from penstock.models.executor.join.link import JoinLink
from penstock.models.executor.join_messages import RankEnded
from penstock.models.executor.process import WorkerProcess
from penstock.models.executor.wire import FrameKind, encode_frame
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


class HostedRank:
    """One run of a rank's worker process. It starts at once."""

    def __init__(self, link: JoinLink, rank: int, config: WorkerConfig) -> None:
        self._link = link
        self._rank = rank
        self._worker = WorkerProcess(config)
        self._running = asyncio.create_task(self._run())
        self._ending: asyncio.Task[None] | None = None

    def take(self, kind: FrameKind, body: object) -> None:
        """Applies a frame of the leader: a whole one with a plan, or the reason to end the process."""
        if kind is FrameKind.KILL:
            self._worker.kill(str(body))
        elif isinstance(body, bytes):
            with contextlib.suppress(ExecutorError):  # it has ended, which the leader learns already
                self._worker.submit_frame(body)

    def end(self) -> None:
        """Ends the process, and then reports that."""
        self._ending = asyncio.create_task(self._end())

    @property
    def is_ending(self) -> bool:
        """Whether ``end`` was called, and the process is not reaped yet."""
        return self._ending is not None and not self._ending.done()

    async def abort(self) -> None:
        """Ends the process at once and reaps it; reports nothing."""
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
            return
        self._worker.kill("the leader is lost")
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._worker.stop()

    async def _end(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._worker.stop()
        self._link.send_for(self._rank, encode_frame(FrameKind.STOPPED, None))

    async def _run(self) -> None:
        logger.info("rank %d starts", self._rank)
        try:
            facts = await self._worker.start()
            logger.info("rank %d runs on %s, backend %s", self._rank, facts.device, facts.backend)
            self._link.send_for(self._rank, encode_frame(FrameKind.FACTS, facts))
            async for result in self._worker.results():
                self._link.send_for(self._rank, encode_frame(FrameKind.RESULT, result))
        except ExecutorError as error:
            logger.warning("rank %d has ended: %s", self._rank, error)
            self._link.send_for(self._rank, encode_frame(FrameKind.ENDED, RankEnded(str(error), error.blames_step)))
