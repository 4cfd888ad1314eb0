"""The phases and moments of a request's timeline, which become spans and events."""

import pytest

from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Change, EngineFinishReason, Request
from penstock.scheduler.timeline import Timeline
from penstock.scheduler.timeline_entry import PreemptionCause, PreemptionDetail, WaitCause
from penstock.service.telemetry.phases import MAX_PHASES, Phase, PhaseName, moments_of, phases_of


class Clock:
    """A second passes with each reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def clock():
    return Clock()


def timeline_of(clock, n=1):
    request = Request("R", [1] * 100, [], SamplingParams(), 50, lambda event: None, lambda: None, n=n, arrival=0.5)  # type: ignore[arg-type,return-value]
    return Timeline(request, clock)


def run(timeline, choice=0, step=0, num_tokens=10):
    """A sequence begins, and its prompt is computed in two chunks."""
    timeline.began(choice, step, 32)
    timeline.prefilled(choice, step, 40)
    timeline.prefilled(choice, step + 1, 28)
    timeline.decodes(choice, step + 1)
    timeline.left(choice, step + 1 + num_tokens, num_tokens)


def names(timeline, clock):
    return [phase.name.value for phase in phases_of(timeline, clock())]


def test_an_ordinary_request_has_four_phases_without_gaps(clock):
    timeline = timeline_of(clock)
    timeline.accepted(2, None)
    run(timeline)
    timeline.ended(EngineFinishReason.LENGTH)
    prepare, queue, prefill, decode = phases_of(timeline, clock())
    assert (prepare.name, prepare.begin) == (PhaseName.PREPARE, 0.5)
    assert prepare.end == queue.begin
    assert queue.end == prefill.begin
    assert prefill.end == decode.begin
    assert queue.attributes == {"penstock.choice": 0, "penstock.causes": ["turn"]}
    assert prefill.attributes == {
        "penstock.choice": 0,
        "penstock.first_step": 0,
        "penstock.last_step": 1,
        "penstock.tokens": 68,
        "penstock.cached_tokens": 32,
    }
    assert decode.attributes == {
        "penstock.choice": 0,
        "penstock.first_step": 1,
        "penstock.last_step": 10,
        "penstock.tokens": 10,
    }


def test_a_preempted_request_waits_and_computes_again(clock):
    timeline = timeline_of(clock)
    timeline.accepted(0, None)
    run(timeline)
    timeline.preempted(0, 12, PreemptionDetail(PreemptionCause.BLOCKS, "OTHER", 1))
    run(timeline, step=20, num_tokens=50)
    timeline.ended(EngineFinishReason.LENGTH)
    assert names(timeline, clock) == ["prepare", *["queue", "prefill", "decode"] * 2]
    preempted = moments_of(timeline)[1]
    assert preempted.name == "penstock.preempted"
    assert preempted.attributes == {
        "penstock.cause": "blocks",
        "penstock.for_request_id": "OTHER",
        "penstock.choice": 0,
        "penstock.step": 12,
    }


def test_a_request_waits_from_the_workers_death_and_only_sequences_with_rows_do(clock):
    timeline = timeline_of(clock, n=2)
    timeline.accepted(0, None)
    for choice in (0, 1):
        run(timeline, choice)
    timeline.preempted(1, 12, PreemptionDetail(PreemptionCause.BLOCKS, "OTHER", 1))
    timeline.restarted(13)
    died = clock.now
    timeline.waits(0, WaitCause.WORKER)
    run(timeline, 0, 20, 50)
    timeline.ended(EngineFinishReason.CANCELLED)
    queues = [phase for phase in phases_of(timeline, clock()) if phase.name is PhaseName.QUEUE]
    again = [phase for phase in queues if phase.choice == 0][1]
    assert again.begin == died
    assert again.causes == ["worker"]
    [preempted] = [phase for phase in queues if phase.choice == 1]
    assert preempted.begin < died
    assert [moment.name for moment in moments_of(timeline)] == [
        "penstock.accepted",
        "penstock.preempted",
        "penstock.worker_died",
    ]


def test_a_request_that_ends_in_the_queue_waited_until_its_end(clock):
    timeline = timeline_of(clock)
    timeline.accepted(1, None)
    timeline.ended(EngineFinishReason.CANCELLED)
    end = clock()
    queue = phases_of(timeline, end)[-1]
    assert (queue.name, queue.end) == (PhaseName.QUEUE, end)


def test_a_death_in_the_first_step_leaves_no_decoding(clock):
    """The timeline has an entry for the token that the lost step would have chosen."""
    timeline = timeline_of(clock)
    timeline.accepted(0, None)
    timeline.began(0, 0, 0)
    timeline.prefilled(0, 0, 100)
    timeline.will_decode(0, 0)
    timeline.left(0, 0, 0)
    timeline.restarted(1)
    timeline.ended(EngineFinishReason.CANCELLED)
    assert names(timeline, clock) == ["prepare", "queue", "prefill"]


def test_a_request_that_is_not_read_is_held_and_its_changes_are_moments(clock):
    timeline = timeline_of(clock)
    timeline.accepted(0, None)
    run(timeline)
    timeline.held()
    timeline.released()
    timeline.updated(Change(priority=3))
    timeline.first_token_at = 5.5
    timeline.ended(EngineFinishReason.LENGTH)
    held = phases_of(timeline, clock())[-1]
    assert held.name is PhaseName.HELD
    assert held.attributes == {"penstock.causes": ["unread"]}
    assert [moment.name for moment in moments_of(timeline)] == [
        "penstock.accepted",
        "penstock.first_token",
        "penstock.updated",
    ]


def test_the_phases_of_a_huge_request_are_bounded(clock):
    timeline = timeline_of(clock, n=1000)
    timeline.accepted(0, None)
    for choice in range(1000):
        run(timeline, choice)
    timeline.ended(EngineFinishReason.LENGTH)
    phases = phases_of(timeline, clock())
    assert len(phases) == MAX_PHASES
    assert phases == sorted(phases, key=lambda phase: phase.begin)
    assert all(isinstance(phase, Phase) and phase.begin <= phase.end for phase in phases)
