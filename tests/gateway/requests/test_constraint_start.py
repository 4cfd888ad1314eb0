"""Where constraints begin to hold, live: a model of random weights whose chat template opens reasoning, over gRPC and
HTTP."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import jsonschema
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from thinker import CLOSES, OPENS, write_thinker
from waiting import wait_until

import penstock.v1 as pb
from penstock.service.app.embedded import local_service
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1 import (
    CONSTRAINT_START_FIRST_TOKEN,
    Constraint,
    ConstraintStart,
    StringChoices,
    generation_pb2_grpc as pb_grpc,
)

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SOON = {str(CLOSES): 3.5}
"""Closes the reasoning after some tokens."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[str]:
    path = write_thinker(tmp_path_factory.mktemp("thinker"), byte_tokenizer.directory)
    with local_service(str(path), backend="reference", threads=1, kv_cache_memory_bytes="64M") as target:
        yield target


async def _ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The message."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "seed": 1, "logit_bias": SOON}
    answer = await http.post("/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


KINDS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": FORMAT},
    "json_object": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"guided_regex": "[ab]{3}"},
    "lark": {"guided_grammar": 'start: "x" | "y"'},
    "gbnf": {"guided_grammar": 'root ::= "x" | "y"'},
    "forced call": {"tools": [TOOL], "tool_choice": "required"},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_reasoning_is_free_and_the_answer_is_held(target: str, http_before: Any, kind: str) -> None:
    async with http_before(target) as (_, http):
        free = await _ask(http, tools=KINDS[kind].get("tools"))
        message = await _ask(http, **KINDS[kind])
        switched_off = await _ask(http, **KINDS[kind], chat_template_kwargs={"enable_thinking": False})
        first = await _ask(http, **KINDS[kind], constrained_decoding_start="first_token")
    # As without a constraint, which lets it go on after the end of the reasoning.
    assert message["reasoning"] == free["reasoning"] != ""
    for held in (message, switched_off, first):
        if kind == "json_object":
            assert held["content"].startswith("{")
        elif kind == "forced call":
            jsonschema.validate(json.loads(held["tool_calls"][0]["function"]["arguments"]), SCHEMA)
        elif kind in ("response_format", "structured_outputs"):
            jsonschema.validate(json.loads(held["content"]), SCHEMA)
        else:
            assert held["content"] in ("yes", "no", "x", "y") or set(held["content"]) <= {"a", "b"}
    assert not switched_off.get("reasoning")
    assert not first.get("reasoning")


async def test_the_answer_has_room(target: str, http_before: Any) -> None:
    """Also where the model would reason for ever, and where one of many choices would."""
    async with http_before(target) as (_, http):
        never = {str(CLOSES): -100}
        message = await _ask(http, **KINDS["response_format"], logit_bias=never, max_tokens=160)
        short = await _ask(http, **KINDS["response_format"], logit_bias=never, max_tokens=3)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 160, "n": 3, "logit_bias": never}
        answer = await http.post("/v1/chat/completions", json={**body, **KINDS["choice"], "min_tokens": 130})
    assert message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert not short["content"]
    assert {choice["message"]["content"] for choice in answer.json()["choices"]} <= {"yes", "no"}


async def test_a_model_may_open_reasoning_itself(target: str, http_before: Any) -> None:
    async with http_before(target) as (_, http):
        ask: dict[str, Any] = {**KINDS["choice"], "chat_template_kwargs": {"wait": True}}
        reasoned = await _ask(http, **ask, logit_bias={str(OPENS): 100, str(CLOSES): 3.5})
        straight = await _ask(http, **ask, logit_bias={str(OPENS): -100})
    assert reasoned["reasoning"]
    assert reasoned["content"] in ("yes", "no")
    assert not straight.get("reasoning")
    assert straight["content"] in ("yes", "no")


async def test_strict_tools_leave_reasoning_free(target: str, http_before: Any) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    async with http_before(target) as (_, http):
        free, held = await _ask(http, tools=[TOOL]), await _ask(http, tools=[strict])
    assert held["reasoning"] == free["reasoning"] != ""


def _complete(target: str, start: pb.GenerationStart) -> str:
    start.sampling.MergeFrom(pb.SamplingParams(max_tokens=100, seed=2, logit_bias={CLOSES: 3.5}))
    with grpc.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        answer: pb.CompleteResponse = stub.Complete(pb.CompleteRequest(start=start), timeout=120)
    return answer.choices[0].text


def _worker_of(target: str) -> psutil.Process | None:
    """The process that computes for the service; None while there is none."""
    services = [
        each for each in psutil.process_iter(["cmdline"]) if f"--listen={target}" in (each.info["cmdline"] or ())
    ]
    for service in services:
        for child in service.children():
            with suppress(psutil.Error):
                if any("penstock.models.worker.main" in part for part in child.cmdline()):
                    return child
    return None


def _wait_until_replaced(target: str, killed: psutil.Process, channel: grpc.Channel) -> None:
    """Waits until the service serves with a worker other than ``killed``."""
    wait_until(lambda: _worker_of(target) not in (None, killed))
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    wait_until(lambda: health.Check(request, timeout=120).status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("where", ["reasoning", "answer", pytest.param("limited reasoning", marks=pytest.mark.soak)])
def test_a_new_worker_goes_on_where_the_old_one_died(target: str, where: str) -> None:
    """Within reasoning, which then has as many tokens as it would have had, or after it. Repeated until the kill comes
    before the end: a busy machine may run this client later than the whole request."""
    sampling = pb.SamplingParams(max_tokens=400, seed=2, logit_bias={CLOSES: -100.0, 256: -100.0})
    constraint = Constraint(regex="[ab]{90}")
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)
    start = pb.GenerationStart(chat=_chat("hi"), sampling=sampling, constraint=constraint, output=output)
    kill_after = 305 if where == "answer" else 60
    if where == "limited reasoning":
        start.sampling.thinking_token_budget = 200
    restarts = 0
    with grpc.insecure_channel(target) as channel:
        while not restarts:
            token_ids: list[int] = []
            worker, is_killed = wait_until(lambda: _worker_of(target)), False
            for message in pb_grpc.GenerationServiceStub(channel).GenerateOne(
                pb.GenerateOneRequest(start=start), timeout=120
            ):
                token_ids += [each for delta in message.deltas for each in delta.token_ids]
                if not is_killed and len(token_ids) >= kill_after:
                    worker.kill()
                    is_killed = True
                restarts = message.finished.timings.restarts
            _wait_until_replaced(target, worker, channel)
    num_reasoning = token_ids.index(CLOSES)
    assert num_reasoning == (200 if where == "limited reasoning" else 400 - 100 - 1)
    assert re.fullmatch(
        r"[ \n]{0,2}[ab]{90}", bytes(each for each in token_ids[num_reasoning + 1 :] if each < 256).decode()
    )


def _held(start: "ConstraintStart.ValueType" = 0) -> Constraint:  # type: ignore[assignment]
    return Constraint(choices=StringChoices(values=["yes", "no"]), start=start)


def _ids(text: str) -> pb.TokenIds:
    """Ids of ASCII and marks."""
    marks = {"<think>": OPENS, "</think>": CLOSES}
    parts = re.split("(</?think>)", text)
    return pb.TokenIds(ids=[each for part in parts for each in ([marks[part]] if part in marks else part.encode())])


def _chat(*contents: str, **fields: Any) -> pb.Chat:
    roles = ("user", "assistant")
    messages = [pb.ChatMessage(role=roles[at % 2], content=content) for at, content in enumerate(contents)]
    return pb.Chat(messages=messages, **fields)


OPEN = [
    pb.GenerationStart(chat=_chat("hi")),
    pb.GenerationStart(text="Q: hi\n<think>\n"),
    pb.GenerationStart(text="Q: hi\n<think>\nSo far, so"),
    pb.GenerationStart(token_ids=_ids("q<think>")),
    pb.GenerationStart(token_ids=_ids("<think>a</think>b<think>c")),
    pb.GenerationStart(chat=_chat("hi", "<think>I am", continue_final_message=True)),
]
CLOSED = [
    pb.GenerationStart(chat=_chat("hi", template_variables_json='{"enable_thinking": false}')),
    pb.GenerationStart(text="Q: hi\n<think>\nSo.\n</think>\n\n"),
    pb.GenerationStart(token_ids=_ids("<think>a</think>")),
    pb.GenerationStart(chat=_chat("hi", "<think>I am</think>The answer is ", continue_final_message=True)),
    pb.GenerationStart(chat=_chat("hi", "The answer is ", continue_final_message=True)),
]


@pytest.mark.parametrize("start", OPEN, ids=range(len(OPEN)))
def test_prompts_that_open_reasoning(target: str, start: pb.GenerationStart) -> None:
    first, after = pb.GenerationStart(), pb.GenerationStart()
    first.CopyFrom(start)
    after.CopyFrom(start)
    first.constraint.CopyFrom(_held(CONSTRAINT_START_FIRST_TOKEN))
    after.constraint.CopyFrom(_held())
    _, _, answer = _complete(target, after).partition("</think>")
    assert answer.lstrip(" \n") in ("yes", "no")
    assert _complete(target, first) in ("yes", "no")


@pytest.mark.parametrize("start", CLOSED, ids=range(len(CLOSED)))
def test_prompts_that_closed_it(target: str, start: pb.GenerationStart) -> None:
    held = pb.GenerationStart()
    held.CopyFrom(start)
    held.constraint.CopyFrom(_held())
    held.sampling.logit_bias[OPENS] = -100
    assert _complete(target, held) in ("yes", "no")
