"""The hostile benchmark reports what is not as wanted, also if an attack failed or was refused for another reason."""

import json
from collections import Counter

import pytest
from hostile_bench.attacks import ATTACKS
from hostile_bench.classes import CLASSES, HostileClass
from hostile_bench.outcome import Cost, Outcome
from hostile_bench.victim import Seen

CLASS = HostileClass("heads", 7, "heads", ("connection closed", "reset"))


def an_outcome() -> Outcome:
    return Outcome(
        alone=Seen([0.01] * 100, [0.002] * 100),
        attacked=Seen([0.029] * 100, [0.003] * 100),
        cost=Cost(1.0, 10, 1 << 20, Counter({"reset CANCEL": 10})),
        before_bytes={"all": 100 << 20, "service": 100 << 20},
        peak_bytes={"all": 300 << 20, "service": 300 << 20},
    )


def test_a_class_can_be_as_wanted() -> None:
    assert an_outcome().faults(CLASS) == []


@pytest.mark.parametrize(
    "answers", [Counter(), Counter({"UNAUTHENTICATED": 10}), Counter({"ConnectionRefusedError": 10})], ids=str
)
def test_an_attack_without_the_expected_answer_is_a_fault(answers: Counter[str]) -> None:
    outcome = an_outcome()
    outcome.cost.answers = answers
    assert ["did not get through" in fault for fault in outcome.faults(CLASS)] == [True]


def test_each_bound_that_is_exceeded_is_a_fault() -> None:
    outcome = an_outcome()
    outcome.attacked = Seen([0.031] * 100, [0.0021] * 100, ["UNAVAILABLE: gone"] * 2)
    outcome.peak_bytes["all"] = 357 << 20
    outcome.log_bytes = 65 << 10
    outcome.restarted = ["worker"]
    assert outcome.faults(CLASS) == [
        "first token: p99 10 -> 31 ms",
        "memory: +257 MiB",
        "log: 65 KiB",
        "restarted or ended: worker",
        "lost 2 requests under attack (UNAVAILABLE: gone)",
    ]


def test_what_was_not_measured_is_a_fault() -> None:
    assert Outcome(failures=["the attacker failed with status 1"]).faults(CLASS) == [
        "the attacker failed with status 1",
        "no times were measured (first token)",
        "no times were measured (between tokens)",
    ]


def test_text_and_json_have_the_same_figures() -> None:
    outcome = an_outcome()
    outcome.failures = ["the attacker failed with status 1"]
    figures = json.loads(json.dumps(outcome.as_json(CLASS)))
    assert figures["faults"] == outcome.faults(CLASS)
    assert figures["victim"]["attacked"]["first_token"]["num_samples"] == 100
    assert figures["memory_bytes"]["growth"] == 200 << 20
    text = outcome.text(CLASS)
    assert "NOT as wanted: the attacker failed with status 1" in text
    assert "p50 10.0 -> 29.0 ms, p99 10.0 -> 29.0 ms; 100 and 100 samples" in text
    assert "(+200): service 300 (+200)" in text


def test_every_attack_has_a_class_and_every_item_too() -> None:
    assert [each.attack for each in CLASSES] == list(ATTACKS)
    assert {each.item for each in CLASSES} == set(range(1, 14)) - {11}
