"""The process that checks grammars, as the service sees it: remembered answers, and what becomes of it when it dies."""

import asyncio
import os
import signal
import time

import grpc
import pytest

import penstock.v1 as pb
from penstock.models.structured_output import check_process as grammar_check
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.grammar_check import GrammarChecks


@pytest.fixture
async def checks(byte_tokenizer):
    checks = GrammarChecks(byte_tokenizer)
    yield checks
    checks.close()


async def test_an_answer_is_remembered(checks):
    first = await checks.grammar(pb.Constraint(regex="a+"), "one")
    checks._end(checks._process)
    assert await checks.grammar(pb.Constraint(regex="a+"), "other") == first
    assert checks._process.poll() is not None  # nobody needed it


async def test_a_refusal_is_remembered_too(checks):
    for _ in range(2):
        with pytest.raises(ServiceError, match="look-around") as refused:
            await checks.grammar(pb.Constraint(regex="(?=a)b"), "one")
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_FIELD, "constraint.regex")
        checks._end(checks._process)


async def test_a_process_that_died_is_replaced(checks):
    await checks.grammar(pb.Constraint(regex="a"), "one")
    os.kill(checks._process.pid, signal.SIGKILL)
    assert await checks.grammar(pb.Constraint(regex="b"), "one")


async def test_what_takes_too_long_is_refused_and_the_process_goes_on(checks):
    """The library itself would take minutes."""
    with pytest.raises(ServiceError, match="takes more than"):
        await checks.grammar(pb.Constraint(regex="((((a{100}){100}){100}){100}){100}"), "one")
    process = checks._process
    assert await checks.grammar(pb.Constraint(regex="a{100}"), "one")
    assert checks._process is process


async def test_a_busy_machine_is_no_verdict_on_a_grammar(checks):
    """The same constraint is taken as soon as the machine has time for it."""
    answer = checks._answer
    checks._answer = lambda question: {"busy": "the machine is too busy; try again"}
    with pytest.raises(ServiceError, match="too busy") as refused:
        await checks.grammar(pb.Constraint(regex="a+"), "one")
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.retry_after_ms
    checks._answer = answer
    assert await checks.grammar(pb.Constraint(regex="a+"), "one")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_starved_child_is_distinguished_from_one_that_uses_too_much_cpu(monkeypatch):
    """Only the latter says anything about the grammar."""

    def waits(kind, text):
        time.sleep(60)

    def computes(kind, text):
        while True:
            pass

    monkeypatch.setattr(grammar_check, "WALL_S", 3600.0)
    assert "takes more than" in grammar_check._checked(None, "regex", "a", computes)["error"]
    monkeypatch.setattr(grammar_check, "WALL_S", 0.1)
    assert "try again" in grammar_check._checked(None, "regex", "a", waits)["busy"]


async def test_a_tokenizer_unusable_for_grammars_is_reported(checks, tmp_path):
    checks._settings["tokenizer"]["directory"] = str(tmp_path)
    for _ in range(2):
        with pytest.raises(ServiceError) as refused:
            await checks.grammar(pb.Constraint(regex="a"), "one")
        assert refused.value.reason is Reason.NO_GRAMMARS


async def test_many_that_ask_the_same_ask_once(checks):
    asked = []
    answer = checks._answer

    def watched(question):
        asked.append(question)
        return answer(question)

    checks._answer = watched
    await asyncio.gather(*(checks.grammar(pb.Constraint(any_json=pb.AnyJson()), "one") for _ in range(8)))
    assert len(asked) == 1


async def test_a_service_can_stop_in_the_midst_of_it(checks):
    checks.warm()
    asking = asyncio.ensure_future(checks.grammar(pb.Constraint(regex="a"), "one"))
    await asyncio.sleep(0)
    checks.close()
    with pytest.raises((asyncio.CancelledError, ServiceError, RuntimeError)):
        await asking
