"""Drops whole answers that the client does not read: after a time, or sooner when there are too many."""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from penstock.clients.log_rate import LogRate
from penstock.service.call_end import WRITE_PATIENCE_S, end_call

LOOK_S = 1.0
SOON_S = 5.0
"""How long an answer may wait for its reader even when there are too many."""
MAX_BYTES_OF_TENANT = 64 << 20
MAX_BYTES = 256 << 20
"""Limits on answers that wait for longer than that: one tenant's, and all."""

_log = logging.getLogger(__name__)
_log_rate = LogRate()


@dataclass(slots=True)
class _Answer:
    tenant: str
    request_id: str
    num_bytes: int
    since: float


class UnreadAnswers:
    """Keeps track of answers from the moment that gRPC gets them. Belongs to the event loop."""

    def __init__(self) -> None:
        self._answers: dict[asyncio.Task[object], _Answer] = {}
        """Oldest first, by the task of the handler, which is done when its answer has been sent. Finished ones are
        removed at the next look: a callback for each call would cost more."""
        self._timer: asyncio.TimerHandle | None = None
        _log.addFilter(_log_rate)

    def add(self, tenant: str, request_id: str, num_bytes: int) -> None:
        """Adds the answer that the current task is about to return to gRPC."""
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        self._answers[task] = _Answer(tenant, request_id, num_bytes, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for task in [task for task in self._answers if task.done()]:
            del self._answers[task]
        self._timer = loop.call_later(LOOK_S, self._look) if self._answers else None
        now = loop.time()
        waiting = [(task, answer) for task, answer in self._answers.items() if answer.since + SOON_S <= now]
        num_bytes = Counter[str]()
        for _, answer in waiting:
            num_bytes[answer.tenant] += answer.num_bytes
        for task, answer in waiting:
            is_late = answer.since + WRITE_PATIENCE_S <= now
            if is_late or num_bytes[answer.tenant] > MAX_BYTES_OF_TENANT or num_bytes.total() > MAX_BYTES:
                num_bytes[answer.tenant] -= answer.num_bytes
                del self._answers[task]
                end_call(task)
                _log.warning(
                    "call %s: its answer of %d bytes was not read in %.0f s; it is dropped",
                    answer.request_id,
                    answer.num_bytes,
                    now - answer.since,
                )
