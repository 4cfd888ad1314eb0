"""Records each request's timeline: what it waited for, which steps it was in, and why. Decides nothing.

Only changes are recorded. A decoding row costs nothing in a step, and a sequence that still waits for the same thing
costs one comparison. No token and no request is kept, only counts, times and ids.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from penstock.scheduler.request import Change, EngineFinishReason, Request
from penstock.scheduler.timeline_entry import (
    AcceptedDetail,
    BeganDetail,
    Detail,
    DraftDetail,
    EntryKind,
    HoldCause,
    PreemptionDetail,
    TimelineEntry,
    UpdateDetail,
    WaitCause,
    WaitDetail,
)

MAX_ENTRIES = 512
"""The maximum number of entries of a timeline. In a longer one the middle is left out."""
MIN_WAIT_S = 0.001
"""A shorter wait is not recorded: it is the ordinary time until the next plan."""
INTERLUDE_S = 0.1
"""A wait shorter than this between two waits for the same thing is not recorded either."""
_BEGINNING = attrgetter("at")


@dataclass(slots=True, eq=False)
class _Track:
    """The state of one sequence: what it waits for, or which stretch of steps it is in."""

    cause: WaitCause | HoldCause | None = None
    entry: TimelineEntry | None = None
    """The current entry."""
    cause_before: WaitCause | HoldCause | None = None
    wait_before: TimelineEntry | None = None
    """The wait until ``entry`` began, which may still continue."""
    num_output_tokens: int = 0
    """Tokens of the past stretches of decoding."""
    decoded: TimelineEntry | None = None
    """The last stretch of decoding."""
    decodes_from: int | None = None
    """The step with the last chunk of its history, until that step's result."""
    num_drafted: int = 0
    """Drafts in the last stretch of decoding."""
    num_accepted: int = 0
    """The number of these that were accepted."""

    def add_drafts(self, entry: TimelineEntry) -> None:
        """Adds the counts of drafts to an entry of decoding."""
        if self.num_drafted:
            entry.detail = DraftDetail(self.num_drafted, self.num_accepted)


class Timeline:
    """The timeline of one request. The scheduler calls every method in order of time."""

    def __init__(self, request: Request, clock: Callable[[], float]) -> None:
        self.request_id = request.request_id
        self.client_request_id = request.client_request_id
        self.tenant = request.tenant
        self.arrival = request.arrival
        self.prompt_tokens = request.num_prompt_tokens
        self.max_tokens = request.max_tokens
        self.num_choices = request.n
        self.predicted_ttft_s: float | None = None
        """The time from its arrival to the first token, as its caller received it."""
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.ended_by: EngineFinishReason | None = None
        """None while it lives."""
        self._clock = clock
        self._tracks = [_Track() for _ in range(request.n)]
        for track, resumed in zip(self._tracks, request.resumed, strict=False):
            track.num_output_tokens = len(resumed.token_ids)
        self._hold: TimelineEntry | None = None
        self._start: list[TimelineEntry] = []
        self._last: deque[TimelineEntry] | None = None
        """Created once ``_start`` has its half of ``MAX_ENTRIES``."""
        self._num_entries = 0

    @property
    def num_omitted(self) -> int:
        """The number of dropped entries. They would follow entry ``MAX_ENTRIES // 2 - 1``."""
        return self._num_entries - len(self._start) - len(self._last or ())

    def entries(self) -> list[TimelineEntry]:
        """Returns the entries in order of time, including current ones."""
        pending = [entry for track in self._tracks for entry in (track.wait_before, track.entry) if entry is not None]
        if self._hold is not None:
            pending.append(self._hold)
        if self._last is None:
            return sorted(self._start + pending, key=_BEGINNING)
        return sorted(self._start, key=_BEGINNING) + sorted([*self._last, *pending], key=_BEGINNING)

    def so_far(self, choice: int, step: int, num_output_tokens: int) -> None:
        """Updates the current entry before it is read: ``step`` is the first one without the sequence, which has
        ``num_output_tokens`` in total."""
        track = self._tracks[choice]
        if track.entry is not None and track.entry.kind is EntryKind.DECODED:
            track.entry.last_step = step - 1
            track.entry.num_tokens = num_output_tokens - track.num_output_tokens
            track.add_drafts(track.entry)

    def accepted(self, position: int, predicted_ttft_s: float | None) -> None:
        """Records that it entered the queue after ``position`` others, with the first token predicted in this time from
        now."""
        if predicted_ttft_s is not None:
            self.predicted_ttft_s = self._clock() - self.arrival + predicted_ttft_s
        self._add_event(EntryKind.ACCEPTED, detail=AcceptedDetail(position))
        if position:
            self.waits(0, WaitCause.TURN, position)
        else:
            self.waits(0, WaitCause.NEXT_STEP)

    def waits(self, choice: int, cause: WaitCause | HoldCause, *numbers: int) -> None:
        """Records that a plan did not include the waiting sequence. While the cause stays the same, nothing is
        recorded: the numbers shown are the first ones."""
        track = self._tracks[choice]
        if track.cause is cause or self._hold is not None:
            return
        if isinstance(cause, HoldCause):
            entry = self._open(EntryKind.HELD, choice, detail=cause)
        else:
            entry = self._open(EntryKind.WAITED, choice, detail=WaitDetail(cause, numbers))
        if track.cause is None or track.entry is None:
            self._continue_with(track, entry)
        elif track.cause_before is cause and track.wait_before is not None and entry.at - track.entry.at < INTERLUDE_S:
            track.entry, track.wait_before = track.wait_before, None
            track.entry.until = None
        else:
            self._settle(track)
            track.entry.until = entry.at
            track.wait_before, track.cause_before = track.entry, track.cause
            track.entry = entry
        track.cause = cause

    def held(self) -> None:
        """Records that the whole request is held back because its stream is not read. Its sequences wait for nothing
        else meanwhile."""
        if self._hold is None:
            for track in self._tracks:
                if track.cause is not None:
                    self._continue_with(track, None)
            self._hold = self._open(EntryKind.HELD, 0, detail=HoldCause.UNREAD)

    def released(self) -> None:
        if self._hold is not None:
            self._close(self._hold, self._clock())
            self._hold = None

    def began(self, choice: int, step: int, num_cached_tokens: int, num_missed_tokens: int = 0) -> None:
        """Records that a sequence got a row, with this many tokens of its history from the prefix cache. Of the
        ``num_missed_tokens`` after them the KV is cached, but no state was saved."""
        self._continue_with(self._tracks[choice], None)
        detail = BeganDetail(num_missed_tokens) if num_missed_tokens else None
        self._add_event(EntryKind.BEGAN, choice, step, num_cached_tokens, detail)

    def prefilled(self, choice: int, step: int, num_tokens: int) -> None:
        """Records that this many tokens of its history are computed in this step."""
        track = self._tracks[choice]
        entry = track.entry
        if entry is not None and entry.kind is EntryKind.PREFILLED and entry.last_step == step - 1:
            assert entry.first_step is not None
            if entry.num_tokens == num_tokens * (step - entry.first_step):
                entry.last_step = step
                entry.num_tokens += num_tokens
                return
        self._continue_with(track, self._open(EntryKind.PREFILLED, choice, step, num_tokens))

    def will_decode(self, choice: int, step: int) -> None:
        """Records that this step has the last chunk of its history, and chooses a token; then the row decodes."""
        self._tracks[choice].decodes_from = step

    def decodes(self, choice: int, step: int) -> None:
        """Records that this step has chosen a token, and that the row decodes."""
        track = self._tracks[choice]
        track.decodes_from = None
        track.num_drafted = track.num_accepted = 0
        self._continue_with(track, self._open(EntryKind.DECODED, choice, step))

    def drafted(self, choice: int, num_drafted: int, num_accepted: int) -> None:
        """Records the computed and accepted drafts of a step that has its result."""
        track = self._tracks[choice]
        track.num_drafted += num_drafted
        track.num_accepted += num_accepted

    def left(self, choice: int, step: int, num_output_tokens: int) -> None:
        """Records that it is in no step from this one on, for any reason, and has ``num_output_tokens`` in total."""
        track = self._tracks[choice]
        if track.decodes_from is not None:
            self.decodes(choice, track.decodes_from)
        if track.entry is not None and track.entry.kind is EntryKind.DECODED:
            self.so_far(choice, step, num_output_tokens)
            track.decoded = track.entry
        elif track.decoded is not None:  # tokens of steps whose results came after it had left
            track.decoded.num_tokens += num_output_tokens - track.num_output_tokens
            track.add_drafts(track.decoded)
        track.num_output_tokens = num_output_tokens
        self._continue_with(track, None)

    def preempted(self, choice: int, step: int, why: PreemptionDetail) -> None:
        """Records that its row was preempted when this step was planned; it waits again."""
        self._add_event(EntryKind.PREEMPTED, choice, step, detail=why)
        self.waits(choice, WaitCause.NEXT_STEP)

    def restarted(self, step: int) -> None:
        """Records that the worker died before this step was planned, with everything computed for the request."""
        self._add_event(EntryKind.RESTARTED, 0, step)

    def updated(self, change: Change) -> None:
        timeout_s = None if change.deadline is None else change.deadline - self._clock()
        self._add_event(EntryKind.UPDATED, detail=UpdateDetail(change.priority, timeout_s, change.max_tokens))

    def injected(self, choice: int, num_tokens: int) -> None:
        """Records that this many tokens were injected into the history of a waiting sequence."""
        self._add_event(EntryKind.INJECTED, choice, num_tokens=num_tokens)

    def ended(self, reason: EngineFinishReason) -> None:
        for track in self._tracks:
            self._continue_with(track, None)
        self._tracks = []  # frees those of a request with thousands of sequences
        self.released()
        self.ended_by = reason
        self.ended_at = self._clock()
        self._add_event(EntryKind.ENDED, detail=reason)

    def _continue_with(self, track: _Track, entry: TimelineEntry | None) -> None:
        """Ends the sequence's current entry, and continues with ``entry``."""
        self._settle(track)
        if track.entry is not None:
            self._close(track.entry, self._clock() if entry is None else entry.at)
        track.entry = entry
        track.cause = None

    def _settle(self, track: _Track) -> None:
        """Closes the wait before the current entry."""
        if track.wait_before is not None and track.wait_before.until is not None:
            self._close(track.wait_before, track.wait_before.until)
        track.wait_before = None

    def _open(
        self, kind: EntryKind, choice: int, step: int | None = None, num_tokens: int = 0, detail: Detail = None
    ) -> TimelineEntry:
        return TimelineEntry(kind, self._clock(), None, choice, step, step, num_tokens, detail)

    def _close(self, entry: TimelineEntry, now: float) -> None:
        entry.until = now
        if entry.kind is not EntryKind.WAITED or now - entry.at >= MIN_WAIT_S:
            self._add(entry)

    def _add_event(
        self, kind: EntryKind, choice: int = 0, step: int | None = None, num_tokens: int = 0, detail: Detail = None
    ) -> None:
        now = self._clock()
        self._add(TimelineEntry(kind, now, now, choice, step, step, num_tokens, detail))

    def _add(self, entry: TimelineEntry) -> None:
        self._num_entries += 1
        if self._num_entries <= MAX_ENTRIES // 2:
            self._start.append(entry)
        elif self._last is None:
            self._last = deque([entry], maxlen=MAX_ENTRIES // 2)
        else:
            self._last.append(entry)


class EndedTimelines:
    """The timelines of the last ``max_kept`` requests that ended."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._timelines: dict[str, Timeline] = {}
        """Oldest first."""

    def add(self, timeline: Timeline) -> None:
        """Adds the timeline of a request that has just ended."""
        self._timelines[timeline.request_id] = timeline
        self.resize(self._max_kept)

    def find(self, request_id: str) -> Timeline | None:
        """Returns the timeline of a request, if it is still known."""
        return self._timelines.get(request_id)

    def resize(self, max_kept: int) -> None:
        """Changes how many are kept."""
        self._max_kept = max_kept
        while len(self._timelines) > max_kept:
            del self._timelines[next(iter(self._timelines))]
