"""Drops whole responses that the client does not read: after a time, or sooner if there are too many. A tenant that has
many waits for the next ones."""

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial

from penstock.clients.host.log_rate import LogRate
from penstock.service.transport.call_end import WRITE_PATIENCE_S, CallEnder

CHECK_S = 1.0
SOON_S = 5.0
"""How long a response may stay unread even if there are too many."""
MAX_BYTES_OF_TENANT = 64 << 20
MAX_BYTES = 256 << 20
"""Limits on unread responses older than ``SOON_S``: per tenant, and in total."""
ROOM_OF_TENANT = 32 << 20
"""With more bytes than this in large unread responses, the tenant's next calls wait: there is no age limit, and gRPC
keeps a copy of each response."""
LARGE_BYTES = 64 << 10
CALL_BYTES = 16 << 10
"""Memory that gRPC keeps for a call, even if its response is short."""

_log = logging.getLogger(__name__)
_log_rate = LogRate()


@dataclass(slots=True)
class _Answer:
    tenant: str
    request_id: str
    num_bytes: int
    """Size of the response plus ``CALL_BYTES``."""
    since: float


class UnreadAnswers:
    """Keeps track of responses from the moment that gRPC gets them. Belongs to the event loop."""

    def __init__(self) -> None:
        self._answers: dict[asyncio.Task[object], _Answer] = {}
        """Oldest first, by the handler's task, which is done when its response has been sent. Finished ones are removed
        at the next check: a callback per call would cost more."""
        self._large_bytes: Counter[str] = Counter()
        """Bytes of large responses that are not sent yet, by tenant."""
        self._sent: dict[str, asyncio.Event] = {}
        """Set when a large response of the tenant has been sent, if a call waits for that."""
        self._timer: asyncio.TimerHandle | None = None
        self.ender = CallEnder()
        """Ends the call of a task, and drops everything that it has to send."""
        _log.addFilter(_log_rate)

    def add_answer(self, tenant: str, request_id: str, num_bytes: int) -> None:
        """Adds the response that the current task is about to return to gRPC."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._answers[task] = _Answer(tenant, request_id, num_bytes + CALL_BYTES, loop.time())
        if num_bytes > LARGE_BYTES:
            self._large_bytes[tenant] += num_bytes
            task.add_done_callback(partial(self._end_large, tenant, num_bytes))
        if self._timer is None:
            self._timer = loop.call_later(CHECK_S, self._check)

    async def wait_for_room(self, tenant: str) -> None:
        """Waits while the tenant has too many bytes in large responses that are not sent yet."""
        while self._large_bytes[tenant] > ROOM_OF_TENANT:
            await self._sent.setdefault(tenant, asyncio.Event()).wait()

    def _end_large(self, tenant: str, num_bytes: int, _task: asyncio.Task[object]) -> None:
        self._large_bytes[tenant] -= num_bytes
        if not self._large_bytes[tenant]:
            del self._large_bytes[tenant]
        if tenant in self._sent:
            self._sent.pop(tenant).set()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        for task in [task for task in self._answers if task.done()]:
            del self._answers[task]
        self._timer = loop.call_later(CHECK_S, self._check) if self._answers else None
        now = loop.time()
        for task in self._too_many(now):
            answer = self._answers.pop(task)
            self.ender.end(task)
            _log.warning(
                "call %s: its response of %d bytes was not read in %.0f s; it is dropped",
                answer.request_id,
                answer.num_bytes - CALL_BYTES,
                now - answer.since,
            )

    def _too_many(self, now: float) -> list[asyncio.Task[object]]:
        """Returns the responses to drop: late ones, then the oldest of each tenant over its limit, then the oldest of
        the tenant with the most while the total is over its limit."""
        dropped: list[asyncio.Task[object]] = []
        waiting: dict[str, deque[asyncio.Task[object]]] = {}
        num_bytes = Counter[str]()
        for task, answer in self._answers.items():
            if answer.since + WRITE_PATIENCE_S <= now:
                dropped.append(task)
            elif answer.since + SOON_S <= now:
                waiting.setdefault(answer.tenant, deque()).append(task)
                num_bytes[answer.tenant] += answer.num_bytes
        total = num_bytes.total()
        while num_bytes:
            tenant = max(num_bytes, key=num_bytes.__getitem__)
            if num_bytes[tenant] <= MAX_BYTES_OF_TENANT and total <= MAX_BYTES:
                break
            task = waiting[tenant].popleft()
            dropped.append(task)
            num_bytes[tenant] -= self._answers[task].num_bytes
            total -= self._answers[task].num_bytes
            if not waiting[tenant]:
                del num_bytes[tenant]
        return dropped
