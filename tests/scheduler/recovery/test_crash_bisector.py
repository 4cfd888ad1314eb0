"""Who killed the worker: found by running groups that get smaller, with nobody else beside them."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from penstock.scheduler.recovery.crash_bisector import CRASHES_ALONE, MAX_PROBATION, CrashBisector

NUM_TOKENS = 40


@dataclass
class Machine:
    """Requests that decode together, a token a step; a step with a killer at its length is fatal."""

    kills_at: dict[str, int]
    """Killers, and the number of tokens at which their steps are fatal."""
    room: int = 1000
    lengths: dict[str, int] = field(default_factory=dict)
    suspects: CrashBisector = field(default_factory=CrashBisector)
    ended: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    crashes: list[set[str]] = field(default_factory=list)

    def add(self, *names: str) -> None:
        self.lengths |= dict.fromkeys(names, 10)

    def step(self) -> None:
        runnable = [name for name in self.lengths if self.suspects.may_run(name)]
        assert runnable, "requests are alive, and none may run"
        step = {name: self.lengths[name] for name in runnable[: self.room]}
        if any(self.kills_at.get(name) == length for name, length in step.items()):
            self.crashes.append(set(step))
            for name in self.suspects.crashed(step):
                self.refused.append(name)
                del self.lengths[name]
            return
        for name in step:
            self.lengths[name] += 1
        self.suspects.answered({name: self.lengths[name] for name in step if name in self.suspects.on_trial})
        for name in step:
            if self.lengths[name] == 10 + NUM_TOKENS:
                self.end(name)

    def end(self, name: str) -> None:
        del self.lengths[name]
        self.ended.add(name)
        self.suspects.drop_request(name)

    def run(self) -> None:
        for _ in range(20_000):
            if not self.lengths:
                break
            self.step()
        assert not self.lengths, "no end in sight"
        assert not self.suspects
        assert not self.suspects._records
        assert not self.suspects._held | self.suspects._postponed


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.mark.parametrize("killer", ["0", "31", "63"])
def test_only_the_killer_among_64_is_refused(killer):
    machine = Machine({killer: 13})
    machine.add(*names(64))
    machine.run()
    assert machine.refused == [killer]
    assert len(machine.ended) == 63
    # All, all again, halves of 32 down to 1, alone again.
    assert len(machine.crashes) <= 2 + 6 + 1
    assert machine.crashes[-CRASHES_ALONE:] == [{killer}] * CRASHES_ALONE


def test_two_killers_are_both_found():
    machine = Machine({"5": 12, "40": 12})
    machine.add(*names(64))
    machine.run()
    assert sorted(machine.refused) == ["40", "5"]
    assert len(machine.ended) == 62
    assert len(machine.crashes) <= 2 * 9


def test_a_request_that_always_ran_alone_is_refused_after_two_crashes():
    machine = Machine({"0": 20})
    machine.add("0")
    machine.run()
    assert machine.refused == ["0"]
    assert len(machine.crashes) == CRASHES_ALONE


def test_a_crash_that_does_not_come_back_halves_nothing():
    suspects = CrashBisector()
    step = dict.fromkeys(names(8), 10)
    assert suspects.crashed(step) == []
    assert suspects.on_trial == set(step)
    suspects.answered(dict.fromkeys(step, 11))
    assert not suspects
    assert suspects.may_run("0")


def test_chunks_of_a_history_do_not_clear_those_who_died_behind_it():
    suspects = CrashBisector()
    suspects.crashed({"a": 100, "b": 100})
    suspects.answered({"a": 100, "b": 100})
    assert suspects.on_trial == {"a", "b"}
    suspects.answered({"a": 101, "b": 100})
    assert suspects.on_trial == {"a", "b"}


def test_a_group_of_one_runs_alone_before_all_others():
    suspects = CrashBisector()
    for group in ("abcd", "abcd", "ab"):
        suspects.crashed(dict.fromkeys(group, 10))
    assert suspects.on_trial == {"a"}
    assert not any(map(suspects.may_run, ["b", "c", "d", "newcomer"]))
    suspects.answered({"a": 11})
    assert suspects.on_trial == {"b"}
    assert not suspects.may_run("a")
    suspects.answered({"b": 11})
    assert suspects.on_trial == {"c", "d"}
    suspects.answered({"c": 11, "d": 11})
    assert suspects.may_run("newcomer")


def test_members_who_were_not_in_the_fatal_step_are_no_longer_tried_with_those_who_were():
    suspects = CrashBisector()
    suspects.crashed(dict.fromkeys("abcd", 10))
    suspects.crashed(dict.fromkeys("ab", 10))
    assert suspects.on_trial == {"a"}
    suspects.answered({"a": 11})
    suspects.answered({"b": 11})
    assert suspects.on_trial == {"c", "d"}


def test_a_step_without_the_group_on_trial_has_its_own_suspects():
    """What was on its way when the group changed may still be fatal."""
    suspects = CrashBisector()
    suspects.crashed(dict.fromkeys("abcd", 10))
    suspects.crashed(dict.fromkeys("abcd", 10))
    suspects.answered(dict.fromkeys("ab", 11))
    assert suspects.on_trial == {"c", "d"}
    suspects.crashed({"a": 11, "b": 11})
    assert suspects.on_trial == {"a", "b"}
    suspects.answered({"a": 13, "b": 13})
    assert suspects.on_trial == {"c", "d"}


def test_a_killer_that_dies_only_some_steps_after_its_trial_is_found():
    """Each time that it was cleared it has to live on for twice as long."""
    suspects = CrashBisector()
    length, crashes = {"a": 10, "b": 10}, 0
    next_fatal = 14
    while "a" in length:
        running = [name for name in length if suspects.may_run(name)]
        if "a" in running and length["a"] + 1 >= next_fatal:
            crashes += 1
            for name in suspects.crashed({name: length[name] for name in running}):
                del length[name]
            next_fatal = length.get("a", 0) + 4
            continue
        for name in running:
            length[name] += 1
        suspects.answered({name: length[name] for name in running})
    assert list(length) == ["b"]
    assert crashes <= 8


def test_probation_has_a_limit():
    suspects = CrashBisector()
    length = 10
    for _ in range(20):
        suspects.crashed({"a": length, "b": length})
        length += MAX_PROBATION
        suspects.answered({"a": length, "b": length})
        assert not suspects


def test_newcomers_wait_for_a_trial_and_not_longer():
    machine = Machine({"0": 15})
    machine.add(*names(8))
    while not machine.suspects:
        machine.step()
    machine.add("new")
    machine.step()
    assert machine.lengths["new"] == 10
    machine.run()
    assert "new" in machine.ended
    assert not any("new" in crash for crash in machine.crashes)


def test_members_that_find_no_room_do_not_hold_up_the_rest():
    machine = Machine({"2": 15}, room=3)
    machine.add(*names(10))
    machine.run()
    assert machine.refused == ["2"]
    assert len(machine.ended) == 9


def test_nobody_waits_for_one_that_is_held():
    suspects = CrashBisector()
    suspects.hold("b", True)
    suspects.crashed(dict.fromkeys("abc", 10))
    assert suspects.on_trial == {"a", "c"}
    suspects.hold("c", True)
    assert suspects.on_trial == {"a"}
    suspects.answered({"a": 11})
    assert not suspects
    suspects.hold("b", False)
    suspects.hold("never suspected", False)
    assert suspects.on_trial == {"b"}
    suspects.hold("b", True)
    assert not suspects
    suspects.drop_request("b")
    suspects.hold("c", False)
    suspects.answered({"c": 11})
    suspects.drop_request("c")
    suspects.drop_request("a")
    assert not suspects._records


def test_a_request_that_ends_while_it_is_on_trial_makes_way():
    suspects = CrashBisector()
    suspects.crashed(dict.fromkeys("abcd", 10))
    suspects.crashed(dict.fromkeys("abcd", 10))
    suspects.answered({"a": 11, "b": 10})
    suspects.drop_request("b")
    assert suspects.on_trial == {"a"}
    suspects.drop_request("a")
    assert suspects.on_trial == {"c", "d"}
    suspects.drop_request("d")
    suspects.drop_request("c")
    assert not suspects


def test_an_idle_workers_death_blames_no_request():
    suspects = CrashBisector()
    assert suspects.crashed({}) == []
    assert not suspects


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 20),
    killers=st.dictionaries(st.integers(0, 19), st.integers(10, 49), max_size=4),
    room=st.integers(1, 20),
)
def test_only_killers_are_refused_and_all_others_end(count, killers, room):
    machine = Machine({str(number): length for number, length in killers.items() if number < count}, room)
    machine.add(*names(count))
    machine.run()
    assert set(machine.refused) == set(machine.kills_at)
    assert machine.ended == set(names(count)) - set(machine.refused)
    assert len(machine.crashes) <= 12 * len(machine.refused)
