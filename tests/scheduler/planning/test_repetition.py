"""Drafts only where a text repeats itself: when a sequence may have them, when no longer, and what it costs others."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from known_requests import BLOCK_SIZE, MAX_MODEL_LEN, expected_choice
from worlds import turns

from penstock.kv.block_hash import hash_more_blocks
from penstock.scheduler import repetition
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.repetition_search import MANY, RepetitionSearch
from penstock.scheduler.planning.output_buffer import resume_output
from penstock.scheduler.repetition import (
    LONG_MATCH,
    MATCH,
    MAX_UNPAID,
    MAX_VOCAB_SIZE,
    MAX_WAIT,
    MIN_WAIT,
    PORTION,
    Repetition,
)
from penstock.scheduler.request import EngineFinishReason, ResumedSequence

PROSE = [1, 2, 3, 4, 5, 6, 0, 2, 4, 6, 1, 3, 5, 0, 3, 6, 2, 5, 1, 4]
MAX_DRAFTS = 3


@pytest.fixture
def new_world(world_type):
    def make(num_blocks=100, **changes):
        limits = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "drafts_on_repetition": True} | changes
        return world_type(num_blocks, SchedulerConfig(**limits))

    return make


@pytest.fixture
def repeats(monkeypatch):
    """One token that occurred before is enough, so that every text of seven tokens soon repeats itself. A look takes no
    time, so it happens in every step."""
    monkeypatch.setattr(repetition, "MATCH", 1)
    monkeypatch.setattr(repetition, "LOOK_S", 0.0)


def ask(world, new_request, name="one", first=0, **fields):
    return world.add(new_request(name, PROSE[first:], **{"max_tokens": 20, "max_drafts": MAX_DRAFTS} | fields))


# One text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token_ids", [[*range(20), *range(MATCH)], [7] * (MATCH + 1), [0xD800, MAX_VOCAB_SIZE - 1] * 5]
)
def test_a_text_repeats_itself_if_its_last_tokens_occurred_before(token_ids):
    text = Repetition()
    text.look(token_ids)
    assert text.is_found


@pytest.mark.parametrize("token_ids", [[*range(20), *range(MATCH - 1)], [7] * MATCH, [*range(MATCH), 9], [1]])
def test_another_text_does_not(token_ids):
    text = Repetition()
    text.look(token_ids)
    assert not text.is_found


def test_a_text_is_searched_as_it_grows():
    text, token_ids, rng = Repetition(), [], random.Random(0)
    for _ in range(300):
        token_ids.append(rng.randrange(3))
        text.look(token_ids)
        last = token_ids[-MATCH:]
        earlier = any(token_ids[at : at + MATCH] == last for at in range(len(token_ids) - MATCH))
        assert text.is_found == (earlier and len(token_ids) > MATCH)


def test_where_many_sequences_decode_a_longer_repetition_is_needed():
    once, text = list(range(20)), Repetition()
    text.look([*once, *range(LONG_MATCH - 1)], is_crowded=True)
    assert not text.is_found
    text.look([*once, *range(LONG_MATCH)], is_crowded=True)
    assert text.is_found


@pytest.mark.parametrize("num_sequences", [MANY - 1, MANY])
def test_how_many_sequences_decode_decides_how_long_that_is(num_sequences):
    once = [*range(20), *range(MATCH)]
    sequences = [
        SimpleNamespace(token_ids=once, repetition=Repetition(), set_max_drafts=lambda: None)
        for _ in range(num_sequences)
    ]
    running: Any = SimpleNamespace(decoding=sequences)
    RepetitionSearch(running).look(step_s=1.0)
    assert [each.repetition.is_found for each in sequences] == [num_sequences < MANY] * num_sequences


def test_a_long_prompt_takes_several_looks():
    text, token_ids = Repetition(), [*range(PORTION + 1), *range(MATCH)]
    first = text.look(token_ids)
    assert not text.is_found
    assert text.look(token_ids) < first
    assert text.is_found


def test_the_wait_doubles_until_drafts_pay_again():
    text = Repetition()
    waits = []
    for _ in range(8):
        text.look([1, 2] * 10)
        for _ in range(MAX_UNPAID):
            assert text.is_found
            text.count(0, 100)
        assert not text.is_found
        waits.append(text.next_look - 100)
    assert waits == [min(2 * MIN_WAIT * 2**number, MAX_WAIT) for number in range(8)]
    text.look([1, 2] * 10)
    for num_accepted in (3, 0, 0, 3, *[0] * MAX_UNPAID):
        assert text.is_found
        text.count(num_accepted, 100)
    assert text.next_look == 100 + MIN_WAIT


# Sequences ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_text_that_repeats_itself_has_drafts(repeats, new_world, new_request, plans_in_flight):
    world = new_world(max_plans_in_flight=plans_in_flight)
    received = ask(world, new_request)
    plans = list(turns(world))
    first = next(number for number, plan in enumerate(plans) if plan.max_drafts)
    assert first <= 1 + plans_in_flight
    assert all(plan.repeating == [decode.row for decode in plan.decodes if decode.max_tokens > 1] for plan in plans)
    assert received.finished.reason is EngineFinishReason.LENGTH
    assert received.finished.speculation.accepted > 0


def test_prose_has_the_plans_of_a_service_that_drafts_nothing(new_world, new_request):
    def plans_of(max_drafts, **config):
        world = new_world(**config)
        for number in range(3):
            ask(world, new_request, str(number), number, max_drafts=max_drafts)
        plans = list(turns(world))
        assert all(received.finished.speculation is None for received in world.received.values())
        return [(plan.decodes, plan.chunks, plan.blocks, plan.max_drafts, plan.repeating) for plan in plans]

    assert plans_of(MAX_DRAFTS) == plans_of(0, drafts_on_repetition=False)


def test_a_sequence_whose_drafts_do_not_pay_has_none_for_a_while(repeats, new_world, new_request):
    world = new_world(max_plans_in_flight=1)
    decode = world.worker._decode
    world.worker._decode = lambda one, room: decode(one, 0)  # the worker drafts nothing
    ask(world, new_request)
    had_drafts = [plan.max_drafts > 0 for plan in turns(world) if plan.decodes]
    assert had_drafts.count(True) == MAX_UNPAID
    assert not any(had_drafts[had_drafts.index(True) + MAX_UNPAID :]), "the wait is longer than the rest"


def test_predicted_and_forced_tokens_are_drafted_at_once(new_world, new_request):
    world = new_world()
    ask(world, new_request, "predicted", prediction=[1, 2])
    ask(world, new_request, "forced", 1, grammar="g")
    ask(world, new_request, "other", 2)
    rows = {}
    for plan in turns(world):
        for added in plan.added:
            rows[added.row] = world.scheduler._planner.rows.current(added.row).live.request.request_id
        assert {rows[decode.row] for decode in plan.decodes if decode.max_tokens > 1} <= {"predicted", "forced"}
        assert plan.repeating == []
    for name in ("predicted", "forced"):
        assert world.received[name].finished.speculation.drafted > 0


def test_a_request_without_drafts_has_none(repeats, new_world, new_request):
    world = new_world()
    received = ask(world, new_request, max_drafts=0)
    assert not any(plan.max_drafts for plan in turns(world))
    assert received.finished.speculation is None


def test_repetition_outlasts_crashes_and_preemption(repeats, new_world, new_request):
    """There are too few blocks for two, so that one is preempted."""
    world = new_world(num_blocks=14)
    for number in range(2):
        ask(world, new_request, str(number), number)
    has_crashed = False
    for plan in turns(world):
        if plan.max_drafts and not has_crashed:
            has_crashed = True
            world.recover(False)
    assert has_crashed
    assert world.scheduler.counters.preemptions > 0
    assert all(received.finished.speculation.accepted > 0 for received in world.received.values())


@pytest.mark.parametrize(("step_us", "looks"), [(1, range(1, 2)), (1_000_000, range(50, 81))])
def test_the_search_takes_only_its_share_of_the_time(monkeypatch, new_world, new_request, step_us, looks):
    searched = []
    look = Repetition.look

    def record(text, token_ids, **fields):
        searched.append(text)
        return look(text, token_ids, **fields)

    monkeypatch.setattr(Repetition, "look", record)
    world = new_world()
    world.step_us = step_us
    for number in range(4):
        ask(world, new_request, str(number), number)
    list(turns(world))
    assert len(searched) in looks


def test_every_choice_is_searched(repeats, new_world, new_request):
    world = new_world()
    ask(world, new_request, n=3)
    assert len({row for plan in turns(world) for row in plan.repeating}) == 3


@pytest.mark.parametrize("how", ["injected", "resumed"])
def test_tokens_from_elsewhere_are_searched_too(new_world, new_request, how):
    world = new_world()
    request = new_request("one", PROSE, max_tokens=20, max_drafts=MAX_DRAFTS)
    token_ids = expected_choice(request, 0, MAX_MODEL_LEN).token_ids[:9]
    if how == "resumed":
        hashes = hash_more_blocks(PROSE + token_ids, request.block_hashes, BLOCK_SIZE, request.hash_salt)
        request.resumed = [ResumedSequence(token_ids, hashes, resume_output(request, 0, token_ids)[0])]
    received = world.add(request)
    for _ in range(4):
        world.step()
    if how == "injected":
        received.to_inject += token_ids
        assert world.scheduler.inject("one", token_ids)
    for _ in range(4):
        world.step()
    [sequence] = world.scheduler.requests["one"].sequences
    searched = sequence.repetition._text
    assert searched == "".join(map(chr, sequence.token_ids[: len(searched)]))
    assert "".join(map(chr, token_ids)) in searched[len(PROSE) :]
