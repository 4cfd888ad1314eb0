"""Lists live requests as plain data, for operators. Changes nothing.

There may be a hundred thousand, and the event loop must go on: a scan copies only references, in a millisecond, and
then reads a few requests at a time. Its reader lets the loop run in between.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple

from penstock.scheduler.planning.sequence import RequestState, SequenceStatus
from penstock.scheduler.request import Request

MAX_EXAMINED = 256
"""The maximum number of requests and sequences that one read examines, which takes half a millisecond. The last request
may have more sequences."""


class RequestStatus(Enum):
    """What a live request does."""

    WAITING = auto()
    """None of its sequences has a row."""
    PREFILLING = auto()
    """Its prompt is being computed. A request to embed has no other part."""
    DECODING = auto()
    """At least one of its sequences generates output."""
    HELD = auto()
    """It may not run: its output is not read, or others are on trial for the crash of a worker."""


class LiveRequest(NamedTuple):
    """A live request."""

    number: int
    """The arrival number."""
    request: Request
    status: RequestStatus
    num_output_tokens: int
    """Tokens of all its sequences."""
    max_tokens: int
    """The limit of each sequence, with its tenant's cap; 0 for a request to embed."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class LiveRequestFilter:
    """Selects live requests. A request must match all that is set."""

    tenant: str | None = None
    statuses: frozenset[RequestStatus] = frozenset()
    """Empty: every status."""
    arrived_by: float | None = None
    """A time by ``time.monotonic()``."""

    def may_match(self, live: RequestState) -> bool:
        """Checks everything but the status, which takes longer to find out."""
        if live.request.is_warm_up:
            return False  # no client has sent it
        if self.tenant is not None and live.request.tenant != self.tenant:
            return False
        return self.arrived_by is None or live.request.arrival <= self.arrived_by


class LiveRequestScan:
    """Reads the requests that are live when the scan begins, in order of arrival. Those that end meanwhile are left
    out."""

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        may_run: Callable[[str], bool],
        wanted: LiveRequestFilter,
        after: int,
    ) -> None:
        """``requests`` are in order of arrival. ``after`` is the arrival number before the first that is read; -1 for
        all. ``may_run`` returns whether no trial holds a request back."""
        self._requests = requests
        self._may_run = may_run
        self._wanted = wanted
        self._snapshot = list(requests.values())
        self._next = bisect_right(self._snapshot, after, key=attrgetter("number"))

    @property
    def is_done(self) -> bool:
        return self._next >= len(self._snapshot)

    def read(self, max_requests: int) -> list[LiveRequest]:
        """Returns at most ``max_requests`` further ones that match. There may be more if there are fewer, or none."""
        found: list[LiveRequest] = []
        num_examined = 0
        while not self.is_done and len(found) < max_requests and num_examined < MAX_EXAMINED:
            live = self._snapshot[self._next]
            self._next += 1
            num_examined += 1
            if self._requests.get(live.request.request_id) is not live or not self._wanted.may_match(live):
                continue
            num_examined += len(live.sequences)
            status = self._status(live)
            if not self._wanted.statuses or status in self._wanted.statuses:
                num_output_tokens = live.progress if live.request.pooling is None else 0
                max_tokens, num_preemptions = live.sequences[0].output.max_tokens, live.timings.preemptions
                found.append(
                    LiveRequest(live.number, live.request, status, num_output_tokens, max_tokens, num_preemptions)
                )
        return found

    def _status(self, live: RequestState) -> RequestStatus:
        if live.held or not self._may_run(live.request.request_id):
            return RequestStatus.HELD
        statuses = {sequence.state for sequence in live.sequences}
        if SequenceStatus.DECODING in statuses:
            # A pooled sequence only waits for the result of its last chunk.
            return RequestStatus.DECODING if live.request.pooling is None else RequestStatus.PREFILLING
        return RequestStatus.PREFILLING if SequenceStatus.PREFILLING in statuses else RequestStatus.WAITING
