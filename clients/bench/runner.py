"""Sends a load to a service, at given times or as slots become free, and records each request.

async with GrpcCaller(ConnectionOptions("127.0.0.1:50051")) as caller:
    report = await run(RandomLoad(vocab_size=8192, arrivals=OpenLoop(rate=20)), caller)
print(report.summary())
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.clients.bench.report import ClientLoad, Report
from penstock.clients.bench.target import INTERRUPTED, NOT_SENT, BenchTarget, Record
from penstock.clients.bench.workload import BenchRequest, ClosedLoop, Workload

MAX_OUTSTANDING = 4096
"""The default limit of concurrent conversations."""

_PAUSE_AFTER_FAILURE_S = 0.1
_SAMPLE_S = 0.1


@dataclass(slots=True)
class BenchProgress:
    """The progress of a run, as numbers of requests."""

    running: int = 0
    ended: int = 0
    failed: int = 0
    """Failed requests, among those that ended."""
    output_tokens: int = 0
    """Output tokens of requests that ended."""


async def run(
    load: Workload,
    caller: BenchTarget,
    *,
    duration_s: float | None = None,
    max_outstanding: int = MAX_OUTSTANDING,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[BenchProgress], object] | None = None,
) -> Report:
    """Sends all requests and waits until they end.

    Nothing is sent after ``duration_s``. A conversation that is due while ``max_outstanding`` are in flight is not
    sent, and recorded as such. ``stop`` ends running requests and returns the results so far. ``on_progress`` is called
    ten times per second.
    """
    sender = _Sender(load, caller, duration_s, max_outstanding)
    meter = asyncio.create_task(_measure(sender, on_progress))
    sending = asyncio.create_task(sender.send_all())
    stopping = asyncio.create_task(stop.wait() if stop is not None else asyncio.Event().wait())
    try:
        await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        was_stopped = not sending.done()
        for task in (sending, stopping, meter):
            task.cancel()
        await asyncio.wait({sending, stopping, meter})
    if not was_stopped:
        sending.result()  # raises what a caller raised
    ended_s = max((record.ended_s for record in sender.records), default=sender.began_s)
    return Report(sender.records, sender.began_s, ended_s, meter.result(), was_stopped)


@dataclass
class _Sender:
    load: Workload
    caller: BenchTarget
    duration_s: float | None
    max_outstanding: int
    records: list[Record] = field(default_factory=list)
    progress: BenchProgress = field(default_factory=BenchProgress)
    began_s: float = field(default_factory=time.perf_counter)

    async def send_all(self) -> None:
        """Returns when every request has ended."""
        conversations = iter(self.load.conversations())
        try:
            async with asyncio.TaskGroup() as group:
                if isinstance(self.load.arrivals, ClosedLoop):
                    # Drawn before the first is sent; otherwise, the time to draw the others would count as the
                    # service's.
                    first = list(itertools.islice(conversations, self.load.arrivals.concurrency))
                    conversations = itertools.chain(first, conversations)
                    self.began_s = time.perf_counter()
                    for _ in range(self.load.arrivals.concurrency):
                        group.create_task(self._send_in_turn(conversations))
                        await asyncio.sleep(0)  # lets running requests use the event loop
                else:
                    await self._send_at_times(conversations, group)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _is_over(self, when_s: float) -> bool:
        return self.duration_s is not None and when_s - self.began_s >= self.duration_s

    async def _send_in_turn(self, conversations: Iterator[Sequence[BenchRequest]]) -> None:
        """Runs one slot of a closed loop."""
        last: Record | None = None
        while not self._is_over(time.perf_counter()) and (conversation := next(conversations, None)) is not None:
            if last is not None and not last.is_ok:  # avoids a busy loop against a service that refuses
                await asyncio.sleep(max(_PAUSE_AFTER_FAILURE_S, last.retry_after_s or 0))
            last = await self._converse(conversation)

    async def _send_at_times(self, conversations: Iterator[Sequence[BenchRequest]], group: asyncio.TaskGroup) -> None:
        outstanding: set[asyncio.Task[Record | None]] = set()
        for conversation in conversations:
            due = self.began_s + (conversation[0].arrival_s or 0.0)
            if self._is_over(due):
                return
            # Sleeps even if it is late already, to let running requests use the event loop.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(outstanding) >= self.max_outstanding:
                self._not_sent(conversation, f"{self.max_outstanding} were in flight already")
                continue
            task = group.create_task(self._converse(conversation))
            outstanding.add(task)
            task.add_done_callback(outstanding.discard)

    async def _converse(self, conversation: Sequence[BenchRequest]) -> Record | None:
        """Runs one turn after another while they succeed; returns the last record, or None if the run was over
        first."""
        past: list[Record] = []
        for index, request in enumerate(conversation):
            free_s = due_s = time.perf_counter()
            if request.arrival_s is not None:
                due_s = self.began_s + request.arrival_s
                if past:
                    due_s = max(due_s, free_s)
            if self._is_over(due_s):
                break
            if due_s > free_s:
                await asyncio.sleep(due_s - free_s)
            sent_s = time.perf_counter()
            record = Record(request, sent_s, late_s=sent_s - due_s)
            self.records.append(record)
            await self._call(request, past, record)
            past.append(record)
            if not record.is_ok:
                self._not_sent(conversation[index + 1 :], "the previous turn failed")
                break
        return past[-1] if past else None

    async def _call(self, request: BenchRequest, past: Sequence[Record], record: Record) -> None:
        progress = self.progress
        progress.running += 1
        try:
            await self.caller.call(request, past, record)
        except asyncio.CancelledError:
            record.fail(time.perf_counter(), INTERRUPTED, "the run was stopped")
            raise
        finally:
            progress.running -= 1
            progress.ended += 1
            progress.failed += not record.is_ok
            progress.output_tokens += record.output_tokens

    def _not_sent(self, requests: Sequence[BenchRequest], why: str) -> None:
        for request in requests:
            record = Record(request, now := time.perf_counter())
            record.fail(now, NOT_SENT, why)
            self.records.append(record)


async def _measure(sender: _Sender, on_progress: Callable[[BenchProgress], object] | None) -> ClientLoad:
    """Measures the client's own CPU time until it is cancelled."""
    now, loop_cpu, all_cpu = time.perf_counter(), time.thread_time(), time.process_time()
    samples = [(now, loop_cpu)]
    try:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            samples.append((time.perf_counter(), time.thread_time()))
            if on_progress is not None:
                on_progress(sender.progress)
    except asyncio.CancelledError:
        pass
    wall = time.perf_counter() - now
    return ClientLoad(
        loop_share=(time.thread_time() - loop_cpu) / wall,
        busiest_second_share=_busiest_second([*samples, (time.perf_counter(), time.thread_time())]),
        process_share=(time.process_time() - all_cpu) / wall,
    )


def _busiest_second(samples: Sequence[tuple[float, float]]) -> float:
    """Returns the greatest share of a core in any second (or in a shorter run), from pairs of time and CPU time."""
    steps = max(1, min(len(samples) - 1, round(1 / _SAMPLE_S)))
    shares = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in zip(samples, itertools.islice(samples, steps, None), strict=False)
        if later[0] > earlier[0]
    ]
    return max(shares, default=0.0)
