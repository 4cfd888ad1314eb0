"""Divides a request's timeline into phases, which become child spans of the request's span, and moments, which become
its events. Knows nothing about spans."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.scheduler.timeline import Timeline
from penstock.scheduler.timeline_entry import (
    AcceptedDetail,
    DraftDetail,
    EntryKind,
    HoldCause,
    PreemptionDetail,
    TimelineEntry,
    UpdateDetail,
    WaitDetail,
)

Attributes = Mapping[str, str | int | float | Sequence[str]]

MAX_PHASES = 128
"""The maximum number of phases of a request: one with thousands of choices would have tens of thousands."""


class PhaseName(Enum):
    """The name of a phase's span."""

    PREPARE = "prepare"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"


@dataclass(slots=True, eq=False)
class Phase:
    """A stretch of a request's life. Times are by the timeline's clock."""

    name: PhaseName
    begin: float
    end: float
    choice: int = 0
    first_step: int | None = None
    last_step: int | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    drafts: DraftDetail | None = None
    causes: list[str] = field(default_factory=list)
    """What it waits for, or why it is held."""

    @property
    def attributes(self) -> Attributes:
        attributes: dict[str, str | int | float | Sequence[str]] = {}
        if self.name is PhaseName.QUEUE or self.name in _COMPUTING:
            attributes["penstock.choice"] = self.choice
        if self.first_step is not None and self.last_step is not None:
            attributes["penstock.first_step"] = self.first_step
            attributes["penstock.last_step"] = self.last_step
            attributes["penstock.tokens"] = self.num_tokens
        if self.name is PhaseName.PREFILL:
            attributes["penstock.cached_tokens"] = self.num_cached_tokens
        if self.drafts is not None:
            attributes["penstock.drafted_tokens"] = self.drafts.num_drafted
            attributes["penstock.accepted_tokens"] = self.drafts.num_accepted
        if self.causes:
            attributes["penstock.causes"] = self.causes
        return attributes


class Moment(NamedTuple):
    """Something that happened to a request at one time."""

    name: str
    """The name of the event."""
    at: float
    attributes: Attributes


_COMPUTING = (PhaseName.PREFILL, PhaseName.DECODE)
_MOMENTS = {
    EntryKind.ACCEPTED: "penstock.accepted",
    EntryKind.PREEMPTED: "penstock.preempted",
    EntryKind.RESTARTED: "penstock.worker_died",
    EntryKind.UPDATED: "penstock.updated",
    EntryKind.INJECTED: "penstock.injected",
}


def moments_of(timeline: Timeline) -> list[Moment]:
    """Returns what happened to the request, in order of time."""
    moments = [
        Moment(_MOMENTS[entry.kind], entry.at, _of_moment(entry))
        for entry in timeline.entries()
        if entry.kind in _MOMENTS
    ]
    if timeline.first_token_at is not None:
        moments.append(Moment("penstock.first_token", timeline.first_token_at, {}))
    return sorted(moments, key=lambda moment: moment.at)


def _of_moment(entry: TimelineEntry) -> Attributes:
    attributes: dict[str, str | int | float] = {}
    match entry.detail:
        case AcceptedDetail(position):
            attributes["penstock.queue_position"] = position
        case PreemptionDetail(cause, for_request_id):
            attributes["penstock.choice"] = entry.choice
            attributes["penstock.cause"] = cause.name.lower()
            if for_request_id:
                attributes["penstock.for_request_id"] = for_request_id
        case UpdateDetail(priority, timeout_s, max_tokens):
            changes = {"priority": priority, "timeout_s": timeout_s, "max_tokens": max_tokens}
            attributes |= {f"penstock.{name}": value for name, value in changes.items() if value is not None}
    if entry.kind is EntryKind.INJECTED:
        attributes["penstock.tokens"] = entry.num_tokens
    if entry.first_step is not None:
        attributes["penstock.step"] = entry.first_step
    return attributes


def phases_of(timeline: Timeline, now: float) -> list[Phase]:
    """Returns the first ``MAX_PHASES`` phases of a request that ends ``now``, in order of time."""
    phases = _PhaseReader(timeline.arrival, now).read(timeline.entries())
    return sorted(phases, key=lambda phase: phase.begin)[:MAX_PHASES]


class _PhaseReader:
    """Reads a timeline's entries in order."""

    def __init__(self, arrival: float, now: float) -> None:
        self._arrival = arrival
        self._now = now
        self._phases: list[Phase] = []
        self._queued: dict[int, Phase] = {}
        """The current wait of each sequence without a row."""
        self._prefills: dict[int, Phase] = {}
        """The latest prefill of each sequence with a row."""
        self._lost: dict[int, float] = {}
        """When the worker died, for each sequence that had a row then and has not waited since."""

    def read(self, entries: Iterable[TimelineEntry]) -> list[Phase]:
        for entry in entries:
            self._add_entry(entry)
        for choice in list(self._queued):  # it ended before it got a row
            self._leave_queue(choice, self._now)
        return [phase for phase in self._phases if phase.num_tokens or phase.name not in _COMPUTING]

    def _add_entry(self, entry: TimelineEntry) -> None:
        kind, choice, at = entry.kind, entry.choice, entry.at
        until = self._now if entry.until is None else entry.until
        if kind is EntryKind.ACCEPTED:
            self._phases.append(Phase(PhaseName.PREPARE, self._arrival, at))
            self._enter_queue(choice, at)
        elif kind is EntryKind.WAITED:
            self._enter_queue(choice, self._lost.pop(choice, at))
            self._add_cause(choice, entry)
        elif kind is EntryKind.BEGAN:
            if choice in self._lost:
                self._enter_queue(choice, self._lost.pop(choice))
            self._leave_queue(choice, at)
            self._begin_prefill(choice, at, entry.num_tokens)
        elif kind is EntryKind.PREFILLED:
            self._add_chunks(entry, until)
        elif kind is EntryKind.DECODED:
            decode = Phase(PhaseName.DECODE, at, until, choice, entry.first_step, entry.last_step, entry.num_tokens)
            decode.drafts = entry.detail if isinstance(entry.detail, DraftDetail) else None
            self._phases.append(decode)
        elif kind is EntryKind.PREEMPTED:
            self._prefills.pop(choice, None)
            self._enter_queue(choice, at)
        elif kind is EntryKind.RESTARTED:
            self._lost = dict.fromkeys(self._prefills, at)
            self._prefills.clear()
        elif kind is EntryKind.HELD:
            assert isinstance(entry.detail, HoldCause)
            self._phases.append(Phase(PhaseName.HELD, at, until, choice, causes=[entry.detail.name.lower()]))

    def _enter_queue(self, choice: int, at: float) -> None:
        if choice not in self._queued:
            self._queued[choice] = Phase(PhaseName.QUEUE, at, at, choice)

    def _add_cause(self, choice: int, entry: TimelineEntry) -> None:
        assert isinstance(entry.detail, WaitDetail)
        cause, causes = entry.detail.cause.name.lower(), self._queued[choice].causes
        if cause not in causes:
            causes.append(cause)

    def _leave_queue(self, choice: int, at: float) -> None:
        waited = self._queued.pop(choice, None)
        if waited is not None:
            waited.end = at
            self._phases.append(waited)

    def _begin_prefill(self, choice: int, at: float, num_cached_tokens: int) -> Phase:
        prefill = Phase(PhaseName.PREFILL, at, at, choice, num_cached_tokens=num_cached_tokens)
        self._prefills[choice] = prefill
        self._phases.append(prefill)
        return prefill

    def _add_chunks(self, entry: TimelineEntry, until: float) -> None:
        prefill = self._prefills.get(entry.choice)
        if prefill is None:  # its beginning is among the entries that a long timeline leaves out
            prefill = self._begin_prefill(entry.choice, entry.at, 0)
        if prefill.first_step is None:
            prefill.first_step = entry.first_step
        prefill.last_step = entry.last_step
        prefill.num_tokens += entry.num_tokens
        prefill.end = until
