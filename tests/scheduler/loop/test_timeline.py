"""What a request's timeline tells, and how little it keeps."""

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Change, EngineFinishReason, Request
from penstock.scheduler.timeline import MAX_ENTRIES, EndedTimelines, Timeline
from penstock.scheduler.timeline_entry import (
    AcceptedDetail,
    EntryKind,
    HoldCause,
    PreemptionCause,
    PreemptionDetail,
    TimelineEntry,
    UpdateDetail,
    WaitCause,
    WaitDetail,
)


class Clock:
    """Goes on by a second whenever it is asked, or stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tick = 1.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(clock: Clock) -> Callable[[Request], Timeline]:
    return lambda request: Timeline(request, clock)


def request(name: str = "R", **fields: Any) -> Request:
    return Request(name, [1] * 100, [], SamplingParams(), 50, lambda event: None, lambda: None, **fields)  # type: ignore[arg-type,return-value]


def told(timeline: Timeline) -> list[tuple[Any, ...]]:
    """Kind, steps and tokens of each entry."""
    return [(e.kind, e.choice, e.first_step, e.last_step, e.num_tokens) for e in timeline.entries()]


def lasting(timeline: Timeline, kind: EntryKind) -> list[TimelineEntry]:
    return [entry for entry in timeline.entries() if entry.kind is kind]


def test_an_ordinary_request(start: Callable[[Request], Timeline], clock: Clock) -> None:
    timeline = start(request(tenant="acme", client_request_id="mine", arrival=0.5))
    timeline.accepted(2, 0.25)
    timeline.began(0, 7, 32)
    timeline.prefilled(0, 7, 40)
    timeline.prefilled(0, 8, 28)
    timeline.decodes(0, 8)
    timeline.first_token_at = 9.5
    timeline.left(0, 58, 50)
    timeline.ended(EngineFinishReason.LENGTH)
    assert told(timeline) == [
        (EntryKind.ACCEPTED, 0, None, None, 0),
        (EntryKind.WAITED, 0, None, None, 0),
        (EntryKind.BEGAN, 0, 7, 7, 32),
        (EntryKind.PREFILLED, 0, 7, 7, 40),
        (EntryKind.PREFILLED, 0, 8, 8, 28),
        (EntryKind.DECODED, 0, 8, 57, 50),
        (EntryKind.ENDED, 0, None, None, 0),
    ]
    entries = timeline.entries()
    assert entries[0].detail == AcceptedDetail(2)
    assert entries[1].detail == WaitDetail(WaitCause.TURN, (2,))
    assert entries[-1].detail is EngineFinishReason.LENGTH
    assert all(entry.until is not None and entry.until >= entry.at for entry in entries)
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    assert timeline.predicted_ttft_s == 0.75  # half a second after it arrived
    assert timeline.first_token_at == 9.5
    assert (timeline.ended_by, timeline.ended_at) == (EngineFinishReason.LENGTH, clock.now - 1)
    assert (timeline.tenant, timeline.client_request_id, timeline.prompt_tokens) == ("acme", "mine", 100)
    assert (timeline.max_tokens, timeline.num_choices, timeline.arrival) == (50, 1, 0.5)


def test_a_wait_is_noted_once_for_each_cause(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.accepted(0, None)
    for free in (12, 13, 14):
        timeline.waits(0, WaitCause.BLOCKS, free, 40)
    for _ in range(3):
        timeline.waits(0, WaitCause.PREFIX)
    waits = lasting(timeline, EntryKind.WAITED)
    assert [wait.detail for wait in waits] == [
        WaitDetail(WaitCause.NEXT_STEP),
        WaitDetail(WaitCause.BLOCKS, (12, 40)),
        WaitDetail(WaitCause.PREFIX),
    ]
    assert waits[0].until == waits[1].at
    assert waits[1].until == waits[2].at
    assert waits[2].until is None


def test_a_wait_of_ordinary_length_is_not_recorded(start: Callable[[Request], Timeline], clock: Clock) -> None:
    clock.tick = 0.0
    timeline = start(request())
    timeline.accepted(0, None)
    clock.now += 0.0009
    timeline.began(0, 0, 0)
    assert not lasting(timeline, EntryKind.WAITED)


def test_a_short_interlude_is_not_recorded(start: Callable[[Request], Timeline], clock: Clock) -> None:
    clock.tick = 0.0
    timeline = start(request())
    timeline.accepted(1, None)
    for _ in range(1000):
        for cause, seconds in ((WaitCause.BLOCKS, 0.2), (WaitCause.BUDGET, 0.05)):
            timeline.waits(0, cause, 3, 9)
            clock.now += seconds
    timeline.waits(0, WaitCause.BLOCKS, 1, 9)
    clock.now += 1.0
    (waiting,) = lasting(timeline, EntryKind.WAITED)
    assert (waiting.until, waiting.detail) == (None, WaitDetail(WaitCause.BLOCKS, (3, 9)))
    timeline.waits(0, WaitCause.BUDGET, 64)
    clock.now += 0.2
    timeline.waits(0, WaitCause.BLOCKS, 4, 9)
    timeline.began(0, 5000, 0)
    waits = lasting(timeline, EntryKind.WAITED)
    assert [round(wait.until - wait.at, 6) for wait in waits if wait.until is not None] == [251.0, 0.2]
    assert waits[1].detail == WaitDetail(WaitCause.BUDGET, (64,))


def test_chunks_are_one_entry_if_alike_and_in_a_row(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    for step, num_tokens in ((3, 512), (4, 512), (5, 512), (6, 100), (7, 512), (9, 512)):
        timeline.prefilled(0, step, num_tokens)
    assert [(first, last, tokens) for _, _, first, last, tokens in told(timeline)] == [
        (3, 5, 1536),
        (6, 6, 100),
        (7, 7, 512),
        (9, 9, 512),
    ]


def test_preempted_and_begun_again(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.accepted(0, None)
    timeline.began(0, 0, 0)
    timeline.prefilled(0, 0, 100)
    timeline.decodes(0, 0)
    timeline.left(0, 21, 20)
    timeline.preempted(0, 21, PreemptionDetail(PreemptionCause.BLOCKS, "OTHER", 3))
    timeline.waits(0, WaitCause.BLOCKS, 1, 8)
    timeline.began(0, 30, 64)
    timeline.prefilled(0, 30, 57)  # the token that was in flight included
    timeline.decodes(0, 30)
    timeline.left(0, 59, 50)
    timeline.ended(EngineFinishReason.LENGTH)
    assert [entry.num_tokens for entry in lasting(timeline, EntryKind.DECODED)] == [20, 30]
    assert [entry.kind for entry in timeline.entries()][-7:] == [
        EntryKind.PREEMPTED,
        EntryKind.WAITED,
        EntryKind.WAITED,
        EntryKind.BEGAN,
        EntryKind.PREFILLED,
        EntryKind.DECODED,
        EntryKind.ENDED,
    ]
    preempted = lasting(timeline, EntryKind.PREEMPTED)[0]
    assert (preempted.first_step, preempted.detail) == (21, PreemptionDetail(PreemptionCause.BLOCKS, "OTHER", 3))


def test_a_chunk_lasts_until_its_answer(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.prefilled(0, 4, 100)
    timeline.will_decode(0, 4)
    assert [entry.until for entry in timeline.entries()] == [None]
    timeline.decodes(0, 4)
    prefilled, decoded = timeline.entries()
    assert prefilled.until == decoded.at > prefilled.at


def test_a_row_that_left_before_its_last_chunk_was_answered(start: Callable[[Request], Timeline]) -> None:
    """It was in the next steps all the same."""
    timeline = start(request())
    timeline.prefilled(0, 4, 100)
    timeline.will_decode(0, 4)
    timeline.left(0, 6, 0)
    timeline.preempted(0, 6, PreemptionDetail(PreemptionCause.FEWER_ROWS))
    assert told(timeline)[:2] == [(EntryKind.PREFILLED, 0, 4, 4, 100), (EntryKind.DECODED, 0, 4, 5, 0)]


def test_tokens_that_came_after_the_row_had_left(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.decodes(0, 0)
    timeline.left(0, 49, 48)
    timeline.preempted(0, 49, PreemptionDetail(PreemptionCause.FEWER_ROWS))
    timeline.left(0, 50, 50)  # of which the last two ended it
    timeline.ended(EngineFinishReason.LENGTH)
    assert [entry.num_tokens for entry in lasting(timeline, EntryKind.DECODED)] == [50]


def test_restarted(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request(n=2))
    timeline.began(0, 0, 0)
    timeline.decodes(0, 1)
    timeline.left(0, 9, 9)
    timeline.restarted(9)
    timeline.waits(0, WaitCause.WORKER)
    timeline.waits(0, HoldCause.SUSPECT)
    kinds = [entry.kind for entry in timeline.entries()]
    assert kinds == [EntryKind.BEGAN, EntryKind.DECODED, EntryKind.RESTARTED, EntryKind.WAITED, EntryKind.HELD]
    assert lasting(timeline, EntryKind.RESTARTED)[0].last_step == 9


def test_held_and_released(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.accepted(3, None)
    timeline.held()
    timeline.held()
    timeline.waits(0, WaitCause.BLOCKS, 1, 2)  # HELD is the reason already
    timeline.released()
    timeline.released()
    timeline.waits(0, WaitCause.ROWS, 256)
    assert [(entry.kind, entry.detail) for entry in timeline.entries()[1:]] == [
        (EntryKind.WAITED, WaitDetail(WaitCause.TURN, (3,))),
        (EntryKind.HELD, HoldCause.UNREAD),
        (EntryKind.WAITED, WaitDetail(WaitCause.ROWS, (256,))),
    ]
    assert [entry.until is None for entry in timeline.entries()[1:]] == [False, False, True]


def test_what_a_caller_changed(start: Callable[[Request], Timeline], clock: Clock) -> None:
    clock.tick = 0.0
    timeline = start(request())
    timeline.updated(Change(priority=-3, deadline=2.5, max_tokens=20))
    timeline.updated(Change(max_tokens=7))
    told = [entry.detail for entry in lasting(timeline, EntryKind.UPDATED)]
    assert told == [UpdateDetail(-3, 2.5, 20), UpdateDetail(None, None, 7)]


def test_injections(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.injected(0, 7)
    [entry] = lasting(timeline, EntryKind.INJECTED)
    assert (entry.num_tokens, entry.first_step, entry.until) == (7, None, entry.at)


def test_choices_are_distinguished(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request(n=3))
    timeline.began(0, 0, 0)
    timeline.prefilled(0, 0, 100)
    for choice in (1, 2):
        timeline.waits(choice, WaitCause.NEXT_STEP)
        timeline.began(choice, 1, 96)
        timeline.prefilled(choice, 1, 4)
    for choice in range(3):
        timeline.decodes(choice, 1)
    timeline.left(1, 11, 10)
    timeline.left(0, 12, 11)
    timeline.left(2, 13, 12)
    decoded = lasting(timeline, EntryKind.DECODED)
    assert [(entry.choice, entry.last_step, entry.num_tokens) for entry in decoded] == [
        (0, 11, 11),
        (1, 10, 10),
        (2, 12, 12),
    ]


def test_ongoing_decoding_is_reported_up_to_now(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    timeline.decodes(0, 5)
    timeline.so_far(0, 25, 20)
    assert told(timeline) == [(EntryKind.DECODED, 0, 5, 24, 20)]
    timeline.left(0, 55, 50)
    assert told(timeline) == [(EntryKind.DECODED, 0, 5, 54, 50)]


def test_the_middle_of_a_long_timeline_is_left_out(start: Callable[[Request], Timeline]) -> None:
    timeline = start(request())
    for number in range(10_000):
        timeline.updated(Change(priority=number))
    assert len(timeline.entries()) == MAX_ENTRIES
    assert timeline.num_omitted == 10_000 - MAX_ENTRIES
    numbers = [entry.detail.priority for entry in timeline.entries() if isinstance(entry.detail, UpdateDetail)]
    assert numbers == [*range(MAX_ENTRIES // 2), *range(10_000 - MAX_ENTRIES // 2, 10_000)]


def test_the_last_ones_that_ended_are_kept(start: Callable[[Request], Timeline]) -> None:
    ended = EndedTimelines(2)
    for name in ("c", "a", "b"):
        ended.add(start(request(name)))
    assert [name for name in "abc" if ended.find(name)] == ["a", "b"]
    ended.resize(1)
    assert [name for name in "abc" if ended.find(name)] == ["b"]
    ended.resize(0)
    assert not any(ended.find(name) for name in "abc")
    assert ended.find("never") is None


def test_an_ordinary_timeline_is_small(start: Callable[[Request], Timeline]) -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            timeline = start(request(str(number)))
            timeline.accepted(number, 0.5)
            timeline.began(0, number, 16)
            timeline.prefilled(0, number, 84)
            timeline.will_decode(0, number)
            timeline.decodes(0, number)
            timeline.left(0, number + 50, 50)
            timeline.ended(EngineFinishReason.LENGTH)
        per_request = (tracemalloc.get_traced_memory()[0] - before) / 100
    finally:
        tracemalloc.stop()
    assert per_request < 3000


def test_no_token_and_no_request_is_kept(start: Callable[[Request], Timeline]) -> None:
    """Nor what a request refers to: prompt, hashes, sink."""
    asked = request()
    timeline = start(asked)
    timeline.accepted(0, None)
    before = sys.getrefcount(asked), sys.getrefcount(asked.prompt_token_ids), sys.getrefcount(asked.sink)
    ended = EndedTimelines(1)
    ended.add(timeline)
    del timeline
    ended.resize(0)
    assert (sys.getrefcount(asked), sys.getrefcount(asked.prompt_token_ids), sys.getrefcount(asked.sink)) == before
