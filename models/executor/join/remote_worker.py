"""A rank's worker process on another host, as the leader sees it: through the agent there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from penstock.models.executor.join.link import JoinLink, printable
from penstock.models.executor.join_messages import RankEnded
from penstock.models.executor.rank import same_facts, settled
from penstock.models.executor.wire import FrameKind, WireError, encode_frame
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import StepResult
from penstock.scheduler.worker_config import Meeting, MeetingPorts, WorkerConfig, WorkerFacts

STOP_TIMEOUT_S = 15.0
"""How long an agent has to end a rank. A process that hangs in a driver may outlast even SIGKILL."""
MAX_MESSAGE = 1000


@dataclass
class JoinedNode:
    """Another host: its place, and its agent while that is connected."""

    number: int
    """The node rank."""
    identity: str = ""
    """The agent's; also of one that was lost, whose place it keeps until another takes it."""
    address: str = ""
    link: JoinLink | None = None
    is_ready: bool = False
    """Whether its agent has read the model's files."""
    problem: str = "it never came"
    """Why it is not ready."""
    runs: "dict[int, RemoteRun]" = field(default_factory=dict)
    """The runs by rank."""

    def __str__(self) -> str:
        return f"node rank {self.number} ({self.address})" if self.address else f"node rank {self.number}"

    def lose(self, why: str) -> None:
        """Records that the agent is gone."""
        self.link, self.is_ready, self.problem = None, False, why
        runs, self.runs = self.runs, {}
        for run in runs.values():
            run.end(ExecutorError(f"{self}: the agent is lost: {why}"))


class RemoteRun:
    """One run of a rank's worker process."""

    def __init__(self, link: JoinLink, rank: int) -> None:
        self._link = link
        self._rank = rank
        self.facts: asyncio.Future[WorkerFacts] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[StepResult | ExecutorError | None] = asyncio.Queue()
        self.stopped = asyncio.Event()
        self.lost: ExecutorError | None = None

    def send(self, frame: bytes) -> None:
        self._link.send_for(self._rank, frame)

    def take(self, node: JoinedNode, kind: FrameKind, body: object) -> None:
        """Applies a frame from the agent. Raises WireError."""
        match kind, body:
            case FrameKind.FACTS, WorkerFacts() if not self.facts.done():
                self.facts.set_result(body)
            case FrameKind.RESULT, StepResult():
                self.answers.put_nowait(body)
            case FrameKind.ENDED, RankEnded():
                message = f"{node}: {printable(body.message, MAX_MESSAGE)}"
                self._lose(ExecutorError(message, body.blames_step))
            case FrameKind.STOPPED, None:
                self.stopped.set()
            case _:
                raise WireError(f"got a {kind.name} frame about rank {self._rank}")

    def end(self, error: ExecutorError) -> None:
        """Reports that the agent is gone, and with it the process."""
        self._lose(error)
        self.stopped.set()

    def drop(self) -> None:
        """Makes the agent end its connection, and with it the process."""
        self._link.drop("it did not end a rank in time")

    def _lose(self, error: ExecutorError) -> None:
        if self.lost is None:
            self.lost = error
            if not self.facts.done():
                self.facts.set_exception(error)
                self.facts.exception()  # marks it as retrieved, since there may be no waiter
            self.answers.put_nowait(error)


class RemoteWorker:
    """A ``RankWorker`` on another host."""

    def __init__(self, node: JoinedNode, config: WorkerConfig, rank: int) -> None:
        self._node = node
        self._config = config
        self._rank = rank
        self._facts: WorkerFacts | None = None
        self._run: RemoteRun | None = None

    async def start(
        self, meeting: Meeting | None = None, on_ports: Callable[[MeetingPorts], object] | None = None
    ) -> WorkerFacts:
        """Makes the agent start the process. Rank 0 is never on another host, so there are no ports to report."""
        assert self._run is None, "the worker is running"
        assert on_ports is None, "rank 0 is on the leader's host"
        node = self._node
        if node.link is None or not node.is_ready:
            raise ExecutorError(f"{node} is missing: {node.problem}")
        run = self._run = node.runs[self._rank] = RemoteRun(node.link, self._rank)
        config = self._config if meeting is None else msgspec.structs.replace(self._config, meeting=meeting)
        run.send(encode_frame(FrameKind.CONFIG, config))
        try:
            facts = same_facts(self._facts, await run.facts, is_elsewhere=True)
        except BaseException:
            await self.stop()
            raise
        self._facts, self._config = facts, settled(self._config, facts)
        return facts

    def submit_frame(self, frame: bytes) -> None:
        if self._run is None:
            raise ExecutorError("the worker is not running")
        if self._run.lost is not None:
            raise self._run.lost
        self._run.send(frame)

    async def results(self) -> AsyncIterator[StepResult]:
        run = self._run
        while run is not None:
            item = await run.answers.get()
            if isinstance(item, ExecutorError):
                raise item
            if item is None:
                return
            yield item

    def kill(self, why: str) -> None:
        if self._run is not None and self._run.lost is None:
            self._run.send(encode_frame(FrameKind.KILL, why))

    async def stop(self) -> None:
        """Makes the agent end the process and reap it. An agent that does not is dropped."""
        run, self._run = self._run, None
        if run is None:
            return
        run.answers.put_nowait(None)
        if not run.stopped.is_set():
            run.send(encode_frame(FrameKind.STOP, None))
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await run.stopped.wait()
        except TimeoutError:
            run.drop()
        finally:
            if self._node.runs.get(self._rank) is run:
                del self._node.runs[self._rank]
