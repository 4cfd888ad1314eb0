"""Responses in the background: they go on when their caller disconnects, and clients may follow their events."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum, auto

import msgspec

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.errors import GatewayError, as_gateway_error, try_again
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.responses.chunking import portions
from penstock.clients.gateway.responses.http_response import KEEP_ALIVE, as_event
from penstock.clients.gateway.responses.response_writer import ResponseWriter
from penstock.clients.gateway.stored.event_log import EventLog
from penstock.clients.gateway.stored.stored_response import Content, StoredResponse
from penstock.clients.gateway.stored.stored_responses import StoredResponses
from penstock.clients.gateway.upstream.service_link import UpstreamCaller
from penstock.clients.gateway.upstream.upstream_request import Abandoned, Arrival, UpstreamRequest
from penstock.clients.host.error_frames import release_frames

_CHECK_STOP_S = 0.2
"""How soon a second signal to stop ends all responses."""

_log = logging.getLogger(__name__)


class _Cause(Enum):
    """Why the gateway ends a response early."""

    CANCELLED = auto()
    STOPPED = auto()


class BackgroundRun:
    """One response that is being generated."""

    def __init__(
        self,
        response: StoredResponse,
        upstream: UpstreamRequest,
        writer: ResponseWriter,
        caller_name: Callable[[str], str],
        *,
        keeps_events: bool,
    ) -> None:
        """``caller_name``: see ``from_failure``. ``keeps_events``: whether clients may follow the events."""
        self.response = response
        self.request_id = upstream.request_id
        self._upstream = upstream
        self._writer = writer
        self._caller_name = caller_name
        self._log = EventLog() if keeps_events else None
        self._cause: _Cause | None = None
        self._has_ended = False
        self._news = asyncio.Event()
        self._publish(writer.begin_response(upstream.request_id))

    @property
    def keeps_events(self) -> bool:
        return self._log is not None

    def snapshot(self) -> Json:
        """Returns the response as it is now."""
        return self._writer.response

    async def follow(self, first: int, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yields the events from number ``first`` on, until the last one, and an empty one whenever there was none for
        ``keepalive_s`` seconds (0: never)."""
        assert self._log is not None
        while True:
            news, has_ended = self._news, self._has_ended
            data, first = self._log.read(first)
            if data:
                yield data
            elif has_ended:
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), keepalive_s or None)
                except TimeoutError:
                    yield KEEP_ALIVE

    async def generate(self, stored: StoredResponses) -> None:
        """Generates the response to its end and stores it."""
        try:
            closing = await self._generate()
        finally:
            self._upstream.close()
        log = b"" if self._log is None else self._log.encoded([as_event(event) for event in closing])
        content = await Content.encode(closing[-1]["response"], log)
        # A client that has read the last event can fetch and continue the response.
        await stored.end(self.response, content)
        if self.response.content.fields != content.fields:  # it had no room
            response = msgspec.json.decode(self.response.content.as_json())
            closing[-1] |= {"type": "response.failed", "response": response}
        self._has_ended = True
        self._publish(closing)

    def end_early(self, cause: _Cause) -> None:
        """Ends the response, unless it is at its end already."""
        self._cause = cause
        self._upstream.abandon()

    async def _generate(self) -> list[Json]:
        """Returns the last events; all others are published as they arrive."""
        try:
            await self._upstream.pass_on(self._pass_on)
            return self._writer.end()
        except Abandoned:
            if self._cause is _Cause.CANCELLED:
                return self._writer.cancelled()
            error = GatewayError(503, "the gateway was stopped before the response was complete")
        except Exception as failure:
            if not isinstance(failure, GatewayError | RequestFailed):
                _log.error("%s in a background response", type(failure).__name__)  # its text may have a caller's data
            release_frames(failure)
            error = as_gateway_error(failure, self._caller_name)
        return self._writer.failed(error)

    async def _pass_on(self, arrivals: Sequence[Arrival]) -> None:
        for number, portion in enumerate(portions(arrivals)):
            if number:
                await asyncio.sleep(0)
            self._publish(await self._writer.add_arrivals(portion))

    def _publish(self, events: Sequence[Json]) -> None:
        if self._log is not None:
            for event in events:
                self._log.append(as_event(event))
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRuns:
    """The responses that are being generated in the background. Use it by ``async with``."""

    def __init__(self, stored: StoredResponses, max_per_tenant: int, stop_at: Callable[[], float]) -> None:
        """``stop_at``: until when, on the loop's clock, responses go on while the gateway stops."""
        self._stored = stored
        self._max_per_tenant = max_per_tenant
        self._num_of = Counter[str]()
        """The number of each tenant's runs, including those that the service has not accepted yet."""
        self._tasks: dict[str, tuple[BackgroundRun, asyncio.Task[None]]] = {}
        self._stop_at = stop_at

    async def __aenter__(self) -> "BackgroundRuns":
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        while self._tasks and loop.time() < self._stop_at():
            await asyncio.wait(self._all_tasks(), timeout=_CHECK_STOP_S)
        for live, _task in self._tasks.values():
            live.end_early(_Cause.STOPPED)
        if self._tasks:
            await asyncio.wait(self._all_tasks())

    def _all_tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in self._tasks.values()]

    def count(self) -> int:
        """Returns the number of responses that are being generated."""
        return len(self._tasks)

    def run_of(self, response: StoredResponse) -> BackgroundRun | None:
        """Returns the run of a response; None if it has ended."""
        found = self._tasks.get(response.id)
        return None if found is None else found[0]

    async def start(
        self,
        response: StoredResponse,
        start: pb.GenerationStart,
        writer: ResponseWriter,
        caller: UpstreamCaller,
        caller_name: Callable[[str], str],
        *,
        keeps_events: bool,
    ) -> BackgroundRun:
        """Starts a response, once the service has accepted its request, and stores it. For ``caller_name`` and
        ``keeps_events`` see ``BackgroundRun``. Raises GatewayError."""
        tenant = response.tenant
        if self._num_of[tenant] >= self._max_per_tenant:
            message = f"a tenant may have {self._max_per_tenant} responses in the background at a time; wait for one"
            raise try_again(429, message, code="background_full")
        self._num_of[tenant] += 1
        upstream = UpstreamRequest(caller, [start])
        try:
            upstream.send_requests()
            await upstream.accepted()
            run = BackgroundRun(response, upstream, writer, caller_name, keeps_events=keeps_events)
            response.content, response.is_live = await Content.encode(run.snapshot()), True
            await self._stored.add(response)
        except BaseException as error:
            upstream.close()
            self._end(tenant)
            if isinstance(error, RequestFailed):
                release_frames(error)
                raise as_gateway_error(error, caller_name) from None
            raise
        task = asyncio.create_task(run.generate(self._stored), name="penstock-gateway-background")
        self._tasks[response.id] = run, task
        task.add_done_callback(lambda _: self._forget(response))
        return run

    async def cancel(self, response: StoredResponse) -> None:
        """Ends a response early and waits until it is stored. Does nothing if it has ended."""
        if (found := self._tasks.get(response.id)) is not None:
            run, task = found
            run.end_early(_Cause.CANCELLED)
            await asyncio.wait({task})

    def _forget(self, response: StoredResponse) -> None:
        del self._tasks[response.id]
        self._end(response.tenant)

    def _end(self, tenant: str) -> None:
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
