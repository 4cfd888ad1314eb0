"""The work of ``penstock generate``: runs the lines of a file, many concurrently, and writes the results."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import grpc
from tqdm import tqdm

from penstock.clients.cli.batch_files import (
    BadLine,
    HttpJob,
    Id,
    Job,
    Results,
    answer_record,
    bad_line_record,
    failure_record,
    has_failed,
    http_record,
    parse_line,
)
from penstock.clients.cli.batch_gateway import BatchGateway, HttpRefused
from penstock.clients.client import AsyncClient
from penstock.clients.errors import PenstockError, RequestFailed, StreamBroken, Unreachable
from penstock.clients.events import Completion

T = TypeVar("T")


@dataclass
class BatchRun:
    """One run over the lines of a file."""

    client: AsyncClient
    gateway: BatchGateway
    results: Results
    defaults: dict[str, object]
    concurrency: int
    retry_seconds: float
    progress: "tqdm[NoReturn]"
    num_done: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    """The number of failed lines, in this run and earlier ones."""
    output_tokens: int = 0
    _seen: set[Id] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)

    async def run(self, lines: AsyncIterator[bytes]) -> None:
        """Runs every line. Raises PenstockError if the service is gone and does not return."""
        slots = asyncio.Semaphore(self.concurrency)
        number = 0
        try:
            async with asyncio.TaskGroup() as group:
                async for raw in lines:
                    number += 1
                    if (job := self._next_job(number, raw)) is not None:
                        await slots.acquire()
                        group.create_task(self._answer(job)).add_done_callback(lambda _: slots.release())
        except ExceptionGroup as failures:
            expected, bugs = failures.split((PenstockError, OSError))
            if expected is None or bugs is not None:
                raise
            raise expected.exceptions[0] from None

    def _next_job(self, number: int, raw: bytes) -> Job | HttpJob | None:
        """Returns the request of a line, unless it is done already. Writes the error of an invalid line."""
        line = parse_line(number, raw, self.defaults)
        if isinstance(line, Job | HttpJob) and line.id in self._seen:
            is_openai = isinstance(line, HttpJob)
            name = "custom_id" if is_openai else "id"
            line = BadLine(number, line.id, f"{name}: an earlier line also has {line.id!r}", is_openai)
        match line:
            case BadLine() if line.key not in self.results.bad_lines:
                self._done(bad_line_record(line))
            case BadLine():
                self._skip(has_failed=True)
            case Job() | HttpJob():
                self._seen.add(line.id)
                if line.id not in self.results.failed:
                    return line
                self._skip(has_failed=self.results.failed[line.id])
            case None:
                self.progress.update()
        return None

    async def _answer(self, job: Job | HttpJob) -> None:
        if isinstance(job, HttpJob):
            await self._answer_http(job)
            return

        async def send() -> Completion:
            async with self.client.send(job.start) as request:
                return await request.completion()

        try:
            answer = await self._call(send)
        except RequestFailed as failure:
            await self._stop_if_gone(failure)
            self._done(failure_record(job.id, failure))
        else:
            self.output_tokens += answer.usage.output_tokens
            self._done(answer_record(job.id, answer))

    async def _answer_http(self, job: HttpJob) -> None:
        try:
            answer = await self._call(lambda: self.gateway.post(job.url, job.body))
        except HttpRefused as refused:
            await self._stop_if_gone(refused)
            answer = refused.answer
        body = json.loads(answer.body)
        usage = body.get("usage") or {}
        self.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self._done(http_record(job.id, answer.status, answer.headers.get("x-request-id", ""), body))

    async def _call(self, send: Callable[[], Awaitable[T]]) -> T:
        """Sends a request, with retries while the service is away or busy."""
        give_up, attempt = 0.0, 0
        while True:
            try:
                return await send()
            except RequestFailed as failure:
                now = time.monotonic()
                give_up = give_up or now + self.retry_seconds
                # Grows, and is random, so that requests do not retry at once.
                pause = min(15.0, 0.25 * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.0)
                if failure.retry_after is not None:
                    pause = failure.retry_after * random.uniform(1.0, 1.25)
                if not failure.retryable or now + pause > give_up:
                    raise
            attempt += 1
            await asyncio.sleep(pause)

    async def _stop_if_gone(self, failure: RequestFailed) -> None:
        """Stops the job if the service is gone. UNAVAILABLE from a running service is a result of the line."""
        if failure.code is not grpc.StatusCode.UNAVAILABLE:
            return
        if not isinstance(failure, StreamBroken | Unreachable):
            try:
                await self.client.wait_ready(1.0)
                return
            except RequestFailed:
                pass
        raise PenstockError(f"{failure.message}\nresults so far are kept; run the same command again to resume")

    def _done(self, record: dict[str, object]) -> None:
        self.results.write(record)
        self.num_done += 1
        self.num_failed += has_failed(record)
        rate = self.output_tokens / max(0.001, time.monotonic() - self._began)
        self.progress.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self.progress.update()

    def _skip(self, *, has_failed: bool) -> None:
        self.num_skipped += 1
        self.num_failed += has_failed
        self.progress.update()
