"""An adapter is loaded between steps that use all cores, in turns that are a small share of their time."""

import threading
import time

import pytest
from waiting import ManualClock

from penstock.models.worker import turns as worker_turns
from penstock.models.worker.turns import QUIET_S, SHARE, TURN_S, Turns

STEP_S = 0.01


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def turns(clock, monkeypatch):
    monkeypatch.setattr(worker_turns, "LONGEST_S", 60.0)
    return Turns(clock)


def begin(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def begin_in_step(turns, clock, work, step_s):
    """Begins work during a step, and ends the step when the work waits for a turn."""
    with turns.step():
        thread = begin(work)
        while not turns.is_wanted:
            time.sleep(0.001)
        clock.now += step_s
    return thread


def test_without_steps_no_turn_is_awaited(turns):
    for _ in range(10):
        turns.wait()
    turns.end()


def test_the_work_waits_until_a_step_has_ended_and_no_other_follows(turns, clock):
    has_worked = threading.Event()

    def work():
        turns.wait()
        has_worked.set()

    with turns.step():
        thread = begin(work)
        assert not has_worked.wait(4 * QUIET_S)
    assert not has_worked.wait(4 * QUIET_S), "another step may follow at once"
    clock.now += 2 * QUIET_S
    thread.join(60)
    assert has_worked.is_set()


@pytest.mark.parametrize("piece_s", [TURN_S / 4, 5 * TURN_S])
def test_while_steps_follow_each_other_turns_are_a_small_share(turns, clock, piece_s):
    is_over = threading.Event()
    num_pieces = 0

    def work():
        nonlocal num_pieces
        while True:
            turns.wait()
            if is_over.is_set():
                return
            num_pieces += 1
            clock.now += piece_s

    thread = begin_in_step(turns, clock, work, 0.0)
    num_steps = 400
    for _ in range(num_steps):
        with turns.step():
            clock.now += STEP_S
    share = num_pieces * piece_s / (num_steps * STEP_S)
    assert 0.8 / SHARE < share < 1.2 / SHARE
    is_over.set()
    clock.now += 2 * QUIET_S
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_does_not_wait_after_the_last_piece(turns, clock):
    """It would wait for as long as a turn may last."""

    def work():
        turns.wait()
        turns.end()

    thread = begin_in_step(turns, clock, work, 2 * SHARE * TURN_S)
    with turns.step():  # gives a turn, which ends early
        thread.join(60)
    assert not turns.is_wanted
    with turns.step():
        clock.now += SHARE * TURN_S


def test_a_piece_that_takes_too_long_does_not_hold_the_next_step(clock, monkeypatch):
    monkeypatch.setattr(worker_turns, "LONGEST_S", 0.001)
    turns = Turns(clock)
    may_end = threading.Event()

    def work():
        turns.wait()
        may_end.wait(60)
        turns.end()

    thread = begin_in_step(turns, clock, work, 2 * SHARE * TURN_S)
    with turns.step():
        assert thread.is_alive()
    may_end.set()
    thread.join(60)
