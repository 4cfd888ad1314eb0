"""What an output must match, end to end with the demo model: each output does, or the constraint is refused before it
can cost anything. The cases are in constraints.json, in the manner of the JSON Schema test suite; those that would be
long to write down are made here."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import jsonschema
import pytest

import penstock.v1 as pb
from penstock.service.app.embedded import local_service
from penstock.v1 import generation_pb2_grpc as pb_grpc

MAX_TOKENS = 200
SAMPLE = 8
"""In CI, every eighth case."""


class Case(NamedTuple):
    """A constraint, and what must come of it."""

    name: str
    kind: str
    text: Any
    outcome: str
    """output: it is whole; cut: whole, or as long as it may be; refused."""
    oracle: str | None = None
    """A regular expression that says the same, as ``re`` has it."""
    max_tokens: int = MAX_TOKENS

    @property
    def constraint(self) -> pb.Constraint:
        if self.kind == "choices":
            return pb.Constraint(choices=pb.StringChoices(values=self.text))
        if self.kind == "any_json":
            return pb.Constraint(any_json=pb.AnyJson())
        return pb.Constraint(**{self.kind: self.text})


def _deep(levels: int) -> str:
    begin, end = '{"type":"object","properties":{"a":', '},"required":["a"],"additionalProperties":false}'
    return begin * levels + '{"type":"null"}' + end * levels


def _chain(rule: str, levels: int) -> str:
    """Each is twice the next."""
    rules = [f"{rule}{i}: {rule}{i + 1} {rule}{i + 1}" for i in range(levels)]
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{levels}: "a"'])


def _words(number: int) -> str:
    return " | ".join(f'"w{i}"' for i in range(number))


STRING: dict[str, Any] = {"type": "string"}
HOSTILE = [
    Case("30 levels", "json_schema", _deep(30), "output", max_tokens=600),
    Case("1,000 levels", "json_schema", _deep(1000), "refused"),
    Case("9,000 levels of items", "json_schema", '{"items":' * 9000 + "{}" + "}" * 9000, "refused"),
    Case("2,000 values", "json_schema", json.dumps({"enum": [f"v{i}" for i in range(2000)]}), "output"),
    Case(
        "6,000 properties",
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": STRING for i in range(6000)}}),
        "refused",
    ),
    Case(
        "2,500 objects",
        "json_schema",
        json.dumps({"anyOf": [{"type": "object", "properties": {f"p{i}": STRING}} for i in range(2500)]}),
        "refused",
    ),
    Case(
        "product of 20 choices",
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"{c}{i}": STRING}} for c in "pq"]} for i in range(20)]}),
        "refused",
    ),
    Case(
        "refs that double 30 times",
        "json_schema",
        json.dumps(
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
                | {"d30": {"type": "null"}},
                "$ref": "#/$defs/d0",
            }
        ),
        "output",
        oracle="null",  # jsonschema follows each of the 2**30
    ),
    Case("5,000 optional letters", "regex", "a?" * 5000 + "a" * 5000, "refused"),
    Case("5,000 groups", "regex", "(" * 5000 + "a" + ")" * 5000, "refused"),
    Case("5,000 words", "regex", "|".join(f"w{i}" for i in range(5000)), "output"),
    Case("20,000 alternatives", "lark", f"start: {_words(20_000)}", "refused"),
    Case("20,000 brackets", "lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "refused"),
    Case("terminals that double 60 times", "lark", _chain("T", 60), "refused"),
    Case("rules that double 60 times", "lark", _chain("r", 60), "refused"),
    Case("3,000 brackets", "gbnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "refused"),
    Case("15,000 alternatives of GBNF", "gbnf", f"root ::= {_words(15_000)}", "refused"),
    Case("1,024 choices", "choices", [f"choice number {i}" for i in range(1024)], "output"),
]
CASES = [
    *(Case(**case) for case in json.loads(Path(__file__).parents[1].joinpath("constraints.json").read_text())),
    *HOSTILE,
]

Complete = Callable[..., pb.CompleteResponse]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    """Where a service of the demo model is, on one thread as CI has it."""
    with local_service("demo", backend="reference", threads=1, kv_cache_memory_bytes="64M") as target:
        yield target


@pytest.fixture(scope="module")
def complete(target: str) -> Iterator[Complete]:
    """Calls its ``Complete``."""
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)

        def complete(constraint: pb.Constraint, text: str = "An example:", **sampling: Any) -> pb.CompleteResponse:
            start = pb.GenerationStart(
                text=text, constraint=constraint, sampling=pb.SamplingParams(**{"seed": 1, **sampling})
            )
            while True:
                try:
                    answer: pb.CompleteResponse = stub.Complete(pb.CompleteRequest(start=start), timeout=120)
                    return answer
                except grpc.RpcError as error:
                    if "the machine is too busy" not in str(error.details()):
                        raise

        yield complete


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.outcome == "refused" for case in CASES) >= 50


def test_outputs_match_or_are_refused(complete: Complete) -> None:
    check(complete, CASES[::SAMPLE])


@pytest.mark.soak
def test_all_outputs_match_or_are_refused(complete: Complete) -> None:
    check(complete, CASES)


def check(complete: Complete, cases: list[Case]) -> None:
    with ThreadPoolExecutor(4) as pool:
        problems = [problem for problem in pool.map(lambda case: problem_of(complete, case), cases) if problem]
    assert not problems, "\n".join(problems)


def problem_of(complete: Complete, case: Case) -> str:
    """What is wrong with what came of a case; empty if nothing is."""
    try:
        answer = complete(case.constraint, max_tokens=case.max_tokens, temperature=0.7)
    except grpc.RpcError as error:
        said = f"{case.name}: {error.code().name} {error.details()}"
        is_right = case.outcome == "refused" and error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return "" if is_right and f"constraint.{case.kind}:" in said else said
    text, end = answer.choices[0].text, answer.choices[0].end.reason
    if case.outcome == "refused":
        return f"{case.name}: is not refused: {text!r}"
    if end != pb.FINISH_REASON_STOP:
        is_right = case.outcome != "output" and end == pb.FINISH_REASON_LENGTH
        return "" if is_right else f"{case.name}: ended with {pb.FinishReason.Name(end)}: {text[:200]!r}"
    return "" if matches(case, text) else f"{case.name}: does not match: {text!r}"


def matches(case: Case, text: str) -> bool:
    if case.oracle == "anything":
        return True
    if case.oracle == "balanced":
        return re.fullmatch(r"\(+x\)+", text) is not None and text.count("(") == text.count(")")
    if case.oracle is not None:
        return re.fullmatch(case.oracle, text) is not None
    match case.kind:
        case "json_schema":
            schema = json.loads(case.text)
            checker = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            return bool(checker(schema, format_checker=checker.FORMAT_CHECKER).is_valid(json.loads(text)))
        case "any_json":
            return isinstance(json.loads(text), dict)
        case "choices":
            return text in case.text
        case _:
            return re.fullmatch(case.text, text) is not None


SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}}, "required": ["a"]}'
)


def test_what_is_refused_at_once(complete: Complete) -> None:
    """Before anything is compiled; and what it does not go together with."""
    regex = pb.Constraint(regex="a+")
    for constraint, sampling, said in (
        (pb.Constraint(), {}, "constraint: set one of its kinds"),
        (regex, {"ignore_eos": True}, "constraint: not together with ignore_eos"),
        (regex, {"allowed_token_ids": [5]}, "constraint: not together with allowed_token_ids"),
        (pb.Constraint(regex="a" * (64 * 1024 + 1)), {}, "constraint.regex"),
        (pb.Constraint(json_schema=" " * (256 * 1024 + 1)), {}, "constraint.json_schema"),
        (pb.Constraint(choices=pb.StringChoices()), {}, "constraint.choices.values"),
        (
            pb.Constraint(choices=pb.StringChoices(values=["a"] * 1025)),
            {},
            "constraint.choices.values",
        ),
    ):
        with pytest.raises(grpc.RpcError, match=re.escape(said)) as refused:
            complete(constraint, **sampling)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_choices_with_penalties_are_reproducible(complete: Complete) -> None:
    """Three at once, of one grammar, and the same again."""
    sampling: dict[str, Any] = {"n": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5, "max_tokens": MAX_TOKENS}
    first, again = (complete(pb.Constraint(json_schema=SCHEMA), **sampling) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) > 1
    for choice in first.choices:
        assert choice.end.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
        if choice.end.reason == pb.FINISH_REASON_STOP:
            jsonschema.validate(json.loads(choice.text), json.loads(SCHEMA))


@pytest.mark.parametrize("drafts", [None, 0], ids=["drafts", "no drafts"])
def test_a_complete_output_ends_before_min_tokens(target: str, drafts: int | None) -> None:
    """It is the one without them: nothing could follow. Where something can, it does."""
    cases = {
        "a{2}": "aa",
        "(ab|ba)c": "(ab|ba)c",
        "a+": "a{10,}",
    }
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        for regex, expected in cases.items():
            sampling = pb.SamplingParams(seed=1, min_tokens=10, max_tokens=40, stop=["zz"])
            start = pb.GenerationStart(text="x", constraint=pb.Constraint(regex=regex), sampling=sampling)
            if drafts is not None:
                start.max_draft_tokens = drafts
            choice = stub.Complete(pb.CompleteRequest(start=start), timeout=60).choices[0]
            assert re.fullmatch(expected, choice.text)
            assert choice.end.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)
            assert choice.end.reason == pb.FINISH_REASON_STOP or regex == "a+"


def test_stop_strings_wait_for_min_tokens(complete: Complete) -> None:
    digits = pb.Constraint(regex="[0-9]{60}")
    answer = complete(digits, min_tokens=25, max_tokens=60, stop=[str(digit) for digit in range(10)])
    assert answer.finished.usage.output_tokens == 26
    assert answer.choices[0].end.reason == pb.FINISH_REASON_STOP


def test_a_dead_end_is_the_callers(complete: Complete) -> None:
    """The same request would fail again."""
    with pytest.raises(grpc.RpcError, match="nothing can follow it: correct the constraint") as failed:
        complete(pb.Constraint(lark='start: /[a-z]{3}/ "-" C\nC: /c/ & ~/c/'), max_tokens=20)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
