"""The Executor over one worker process: starts it, exchanges frames over an inherited socketpair, and watches it."""

import asyncio
import logging
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

import msgspec

from penstock.models.executor.liveness import Heartbeat, MemoryKills, is_stopped
from penstock.models.executor.rank import same_facts, settled
from penstock.models.executor.spawn import Spawned, spawn
from penstock.models.executor.wire import FrameBuffer, FrameKind, WireError, encode_frame
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, PromptLogprobsPart, StepPlan, StepResult
from penstock.scheduler.worker_config import Meeting, MeetingPorts, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
"""How long a worker has to end by itself when its socket closes. It has no state that SIGKILL would lose."""
KILL_TIMEOUT_S = 10.0
"""How long a worker has to end after SIGKILL. One that hangs in a driver may outlast even that, and is left running."""
POLL_INTERVAL_S = 0.01

WATCH_INTERVAL_S = 0.25
MAX_STOPPED_S = 2.0
"""A worker that was stopped by a signal and silent for this long is replaced."""
MAX_SILENCE_S = 5.0
"""The limit for a worker that was not stopped: ten times the heartbeat interval."""
MAX_LOADING_SILENCE_S = 60.0
"""The same while it loads the model: an import may block all its threads on a slow disk."""


class WorkerProcess:
    """An ``Executor`` over one worker process. All methods must be called on the event loop's thread, which must
    outlive the worker: the kernel ends the worker with the thread that started it."""

    def __init__(self, config: WorkerConfig, spawned: Spawned | None = None) -> None:
        """``spawned`` is the first worker, if its process was started already."""
        self._config = config
        self._spawned = spawned
        self._facts: WorkerFacts | None = None
        self._link: _Link | None = None

    @property
    def pid(self) -> int:
        assert self._link is not None, "the worker was not started"
        return self._link.process.pid

    async def start(
        self, meeting: Meeting | None = None, on_ports: Callable[[MeetingPorts], object] | None = None
    ) -> WorkerFacts:
        """Starts a worker and waits until it has loaded the model. Raises ExecutorError with the worker's own message.

        A later start returns the same facts, however much memory is free by then, or raises ExecutorError. For the
        arguments see ``RankWorker``.
        """
        assert self._link is None, "the worker is running"
        spawned, self._spawned = self._spawned, None
        link = await _Link.open(spawned or self._spawn(), on_ports)
        self._link = link
        config = self._config if meeting is None else msgspec.structs.replace(self._config, meeting=meeting)
        try:
            link.write(encode_frame(FrameKind.CONFIG, config))
            facts = same_facts(self._facts, await link.facts)
        except BaseException:
            await self.stop()
            raise
        self._facts, self._config = facts, settled(self._config, facts)
        return facts

    def _spawn(self) -> Spawned:
        try:
            return spawn()
        except OSError as error:
            raise ExecutorError(f"the worker process cannot be started: {error}") from error

    def submit(self, plan: StepPlan) -> None:
        self.submit_frame(encode_frame(FrameKind.PLAN, plan))

    def submit_frame(self, frame: bytes) -> None:
        """Does the same as ``submit`` for a plan that is encoded already."""
        if self._link is None:
            raise ExecutorError("the worker is not running")
        if self._link.lost is not None:
            raise self._link.lost
        if self._link.is_closing:
            raise ExecutorError("the worker has closed its socket")
        self._link.write(frame)

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        self.submit_frame(encode_frame(FrameKind.LOAD_ADAPTER, load))
        assert self._link is not None
        return await self._link.expect_adapter()

    async def results(self) -> AsyncIterator[StepResult]:
        link = self._link
        while link is not None:
            item = await link.answers.get()
            if isinstance(item, ExecutorError):
                raise item
            if item is None:
                return
            yield item

    def kill(self, why: str) -> None:
        if self._link is not None:
            self._link.kill(ExecutorError(why, blames_step=True))

    async def stop(self) -> None:
        """Ends the worker, first by closing its socket, then by SIGKILL, and reaps it."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class _Link(asyncio.Protocol):
    """One run of a worker: its process, its socket, and the results it has sent."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", on_ports: Callable[[MeetingPorts], object] | None = None
    ) -> None:
        self.process = process
        self._on_ports = on_ports
        self.facts: asyncio.Future[WorkerFacts] = asyncio.get_running_loop().create_future()
        self.answers: asyncio.Queue[StepResult | ExecutorError | None] = asyncio.Queue()
        self.lost: ExecutorError | None = None
        self._adapters: deque[asyncio.Future[AdapterLoaded]] = deque()
        """What the loads of adapters wait for, in their order."""
        self._buffer = FrameBuffer()
        self._parts: list[PromptLogprobsPart] = []
        self._failure: str | None = None
        self._verdict: ExecutorError | None = None
        self._memory_kills = MemoryKills.here()
        self._heartbeat = Heartbeat(WATCH_INTERVAL_S, asyncio.get_running_loop().time())
        self._watch: asyncio.TimerHandle | None = None
        self._closing = False
        self._transport: asyncio.Transport | None = None
        self._farewell: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, spawned: Spawned, on_ports: Callable[[MeetingPorts], object] | None = None) -> "_Link":
        link = cls(spawned.process, on_ports)
        try:
            spawned.connection.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=spawned.connection)
        except BaseException:
            link._closing = True  # the caller gets the error, so its end needs no report
            spawned.drop()
            raise
        return link

    @property
    def is_closing(self) -> bool:
        """Whether the socket accepts no more data, though ``connection_lost`` may not have been called yet."""
        return self._transport is None or self._transport.is_closing()

    def expect_adapter(self) -> asyncio.Future[AdapterLoaded]:
        """Returns the answer to the load that was sent last."""
        answer = asyncio.get_running_loop().create_future()
        self._adapters.append(answer)
        return answer

    def _fail_adapters(self, error: ExecutorError) -> None:
        while self._adapters:
            if not (answer := self._adapters.popleft()).done():
                answer.set_exception(error)

    def write(self, frame: bytes) -> None:
        """Queues an encoded frame; what the socket does not accept now is sent later."""
        assert self._transport is not None
        self._transport.write(frame)

    def kill(self, verdict: ExecutorError) -> None:
        """Kills the process; ``verdict`` is then reported as the reason of its end."""
        if self._verdict is None:
            self._verdict = verdict
            self.process.kill()
            assert self._transport is not None
            self._unwatch()
            self._watch = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    async def close(self) -> None:
        """Ends the process and reaps it. No more results follow."""
        self._closing = True
        self._unwatch()
        if self._transport is not None:
            self._transport.close()
        try:
            # A worker that is still loading does not read its socket.
            if not await self._ended(CLOSE_TIMEOUT_S if self.facts.done() else 0.0):
                self.process.kill()
                if not await self._ended(KILL_TIMEOUT_S):
                    logger.error("process %d cannot be killed: it is left running", self.process.pid)
        except asyncio.CancelledError:  # this is the last chance to reap it
            self.process.kill()
            self.process.wait()
            raise
        self.answers.put_nowait(None)
        if not self.facts.done():
            self.facts.set_exception(ExecutorError("the worker was stopped while it loaded the model"))
            self.facts.exception()  # marks it as retrieved, since there may be no waiter
        self._fail_adapters(ExecutorError("the worker was stopped"))
        if self._farewell is not None:
            await self._farewell

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods, not by its class
        self._watch_again()

    def data_received(self, data: bytes) -> None:
        """Reads whole frames from the stream; a broken stream ends the worker."""
        self._heartbeat.received(asyncio.get_running_loop().time())
        try:
            for kind, body in self._buffer.feed(data):
                self._take(kind, body)
        except WireError as error:
            self.kill(ExecutorError(f"the worker failed: {error}", blames_step=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports the worker's end: it closes its socket only by ending."""
        self._unwatch()
        if not self._closing:
            self._farewell = asyncio.get_running_loop().create_task(self._report())

    def _take(self, kind: FrameKind, body: object) -> None:
        match kind, body:
            case FrameKind.RESULT, StepResult():
                if self._parts:
                    body.prompt_logprobs = self._parts + body.prompt_logprobs
                    self._parts = []
                self.answers.put_nowait(body)
            case FrameKind.PROMPT_LOGPROBS, list():
                self._parts += body
            case FrameKind.FACTS, WorkerFacts() if not self.facts.done():
                self.facts.set_result(body)
            case FrameKind.PORTS, MeetingPorts() if self._on_ports is not None and not self.facts.done():
                self._on_ports(body)
            case FrameKind.ADAPTER, AdapterLoaded() if self._adapters:
                if not (answer := self._adapters.popleft()).done():  # its caller may have left
                    answer.set_result(body)
            case FrameKind.FAILED, str():
                self._failure = body
            case FrameKind.ALIVE, None:
                pass  # ``data_received`` has recorded it
            case _:
                raise WireError(f"got a {kind.name} frame from the worker")

    def _watch_again(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(WATCH_INTERVAL_S, self._check_heartbeat)

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _check_heartbeat(self) -> None:
        """Kills a process that is alive and makes no progress."""
        silence_s = self._heartbeat.length(asyncio.get_running_loop().time())
        limit = MAX_SILENCE_S if self.facts.done() else MAX_LOADING_SILENCE_S
        if silence_s > MAX_STOPPED_S and is_stopped(self.process.pid):
            self.kill(ExecutorError("the worker was stopped by a signal"))
        elif silence_s > limit:
            self.kill(ExecutorError(f"the worker sent no heartbeat for {limit:.0f} s", blames_step=True))
        else:
            self._watch_again()

    async def _report(self) -> None:
        """Reports how the worker ended to ``start`` and ``results``."""
        if not await self._ended(CLOSE_TIMEOUT_S):
            self.process.kill()
            await self._ended(KILL_TIMEOUT_S)
        self.lost = self._verdict or self._finding()
        if not self.facts.done():
            self.facts.set_exception(self.lost)
        self._fail_adapters(self.lost)
        self.answers.put_nowait(self.lost)

    def _finding(self) -> ExecutorError:
        """Returns the reason that its last message and its exit status show."""
        loading = not self.facts.done()
        if self._failure is not None:
            return ExecutorError(self._failure if loading else f"the worker failed: {self._failure}", blames_step=True)
        when = " while it loaded the model" if loading else ""
        if self.process.returncode != -signal.SIGKILL:
            how = ending(self.process.returncode)
            return ExecutorError(f"the worker {how}{when}: see its own output", blames_step=True)
        if self._memory_kills.have_grown():
            return ExecutorError(f"the worker was ended by SIGKILL{when}: memory ran out", blames_step=True)
        return ExecutorError(f"the worker was ended by SIGKILL{when}, and the kernel reports no lack of memory")

    async def _ended(self, timeout_s: float) -> bool:
        """Whether the process ends in time; reaps it if so."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self.process.poll() is None:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_INTERVAL_S)
        return True


def ending(returncode: int | None) -> str:
    """Describes how a process ended."""
    if returncode is not None and returncode < 0:
        number = -returncode
        name = signal.Signals(number).name if number in signal.Signals.__members__.values() else f"signal {number}"
        return f"was ended by {name}"
    return f"ended with exit code {returncode}"
