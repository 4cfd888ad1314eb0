"""Reasoning with a limit, end to end: the model has random weights, and would reason until its output ends."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from thinker import CLOSES, EOS, OPENS, write_thinker

import penstock.v1 as pb
from penstock.service.app.embedded import local_service
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

NEVER = {CLOSES: -100.0, EOS: -100.0}
"""A bias that neither closes the reasoning nor ends the output."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
Complete = Callable[..., pb.CompleteResponse]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Iterator[GenerationServiceStub]:
    path = write_thinker(tmp_path_factory.mktemp("thinker"), byte_tokenizer.directory)
    settings = {"backend": "reference", "threads": 1, "kv_cache_memory_bytes": "64M", "speculative_config": DRAFTS}
    with local_service(str(path), **settings) as target, grpc.insecure_channel(target) as channel:
        yield GenerationServiceStub(channel)


@pytest.fixture(scope="module")
def complete(stub: GenerationServiceStub) -> Complete:
    """Calls Complete with sampling options and other fields of the start."""

    def complete(*contents: str, chat: dict[str, Any] | None = None, start: Any = None, **sampling: Any) -> Any:
        request = pb.GenerationStart(output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS))
        if contents:
            roles = ("user", "assistant")
            messages = [pb.ChatMessage(role=roles[at % 2], content=each) for at, each in enumerate(contents)]
            request.chat.CopyFrom(pb.Chat(messages=messages, **chat or {}))
        request.sampling.CopyFrom(pb.SamplingParams(**{"seed": 2, "max_tokens": 40, "logit_bias": NEVER, **sampling}))
        if start is not None:
            request.MergeFrom(start)
        return stub.Complete(pb.CompleteRequest(start=request), timeout=120)

    return complete


def ids_of(response: pb.CompleteResponse) -> Sequence[int]:
    [choice] = response.choices
    return list(choice.token_ids)


WAITS = {"template_variables_json": '{"wait": true}'}
"""The template leaves it to the model to open the reasoning."""


@pytest.mark.parametrize("budget", [0, 7])
def test_reasoning_has_at_most_that_many_tokens(complete: Complete, budget: int) -> None:
    """The tokens before the limit are the same as without one, and the answer continues to its own end."""
    free = ids_of(complete("hi"))
    limited = ids_of(complete("hi", thinking_token_budget=budget))
    undrafted = ids_of(complete("hi", thinking_token_budget=budget, start=pb.GenerationStart(max_draft_tokens=0)))
    assert CLOSES not in free
    assert limited == undrafted
    assert limited[:budget] == free[:budget]
    assert [at for at, token_id in enumerate(limited) if token_id == CLOSES] == [budget]
    assert len(limited) == 40


def test_shorter_reasoning_is_as_it_would_be(complete: Complete) -> None:
    soon = {CLOSES: 3.5, EOS: -100.0}
    free = ids_of(complete("hi", logit_bias=soon))
    num_tokens = free.index(CLOSES)
    assert num_tokens > 1
    for budget in (num_tokens, 39, 2**32 - 1):
        assert ids_of(complete("hi", logit_bias=soon, thinking_token_budget=budget)) == free
    assert ids_of(complete("hi", logit_bias=soon, thinking_token_budget=num_tokens - 1))[num_tokens - 1] == CLOSES


@pytest.mark.parametrize("budget", [0, 3])
def test_a_model_may_open_reasoning_itself(complete: Complete, budget: int) -> None:
    opened = ids_of(
        complete("hi", chat=WAITS, logit_bias={**NEVER, OPENS: 100.0}, thinking_token_budget=budget, max_tokens=12)
    )
    assert opened == [OPENS] * (1 + budget) + [CLOSES] + [OPENS] * (10 - budget)
    never = {**NEVER, OPENS: -100.0}
    free = ids_of(complete("hi", chat=WAITS, logit_bias=never))
    assert ids_of(complete("hi", chat=WAITS, logit_bias=never, thinking_token_budget=budget)) == free


def test_without_reasoning_there_is_no_limit(complete: Complete) -> None:
    off = {"template_variables_json": '{"enable_thinking": false}'}
    never = {**NEVER, OPENS: -100.0}
    free = ids_of(complete("hi", chat=off, logit_bias=never))
    assert ids_of(complete("hi", chat=off, logit_bias=never, thinking_token_budget=1)) == free


def test_each_choice_has_its_own(complete: Complete) -> None:
    sampling = {"n": 3, "logit_bias": {CLOSES: 2.0, EOS: -100.0}}
    free, limited = complete("hi", **sampling), complete("hi", **sampling, thinking_token_budget=5)
    assert len({tuple(choice.token_ids) for choice in free.choices}) == 3
    for before, after in zip(free.choices, limited.choices, strict=True):
        natural = [*before.token_ids, CLOSES].index(CLOSES)
        assert list(after.token_ids).index(CLOSES) == min(natural, 5)
        assert after.token_ids[: min(natural, 5)] == before.token_ids[: min(natural, 5)]


def test_what_is_reported(complete: Complete) -> None:
    """Reasoning and answer are separated, and each token has its log-probabilities."""
    output = pb.OutputOptions(parse_reasoning=True, logprobs=1)
    response = complete("hi", thinking_token_budget=6, temperature=0, start=pb.GenerationStart(output=output))
    [choice] = response.choices
    whole = bytes(each if each < 256 else 0 for each in choice.token_ids)
    assert choice.reasoning == whole[:6].decode(errors="replace").strip()
    assert choice.text == whole[7:].decode(errors="replace").lstrip()
    assert response.finished.usage.reasoning_tokens <= 6
    assert len(choice.logprobs.chosen) == len(choice.token_ids) == 40
    assert choice.logprobs.chosen[6] < choice.logprobs.top[6]  # the forced token is not the likeliest


@pytest.mark.parametrize("kind", ["constraint", "tag", "forced call", "strict tool"])
def test_the_constraint_applies_to_the_answer(complete: Complete, kind: str) -> None:
    chat: dict[str, Any] = {}
    start = pb.GenerationStart()
    tag = {"type": "tag", "begin": "<|turn|>", "content": {"type": "regex", "pattern": "[ab]{9}"}, "end": "!"}
    if kind == "constraint":
        start.constraint.regex = "[ab]{9}"
    elif kind == "tag":
        start.constraint.structural_tag_json = json.dumps({"type": "structural_tag", "format": tag})
    else:
        function = pb.FunctionTool(name="f", parameters_json=json.dumps(SCHEMA), strict=kind == "strict tool")
        chat["tools"] = [pb.Tool(function=function)]
        if kind == "forced call":
            chat["parallel_tool_calls"] = False
            chat["tool_choice"] = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
    limited = ids_of(complete("hi", chat=chat, thinking_token_budget=4, max_tokens=120, start=start))
    assert limited.index(CLOSES) == 4
    answer = bytes(each if each < 256 else 0 for each in limited[5:]).decode(errors="replace").strip(" \n\0")
    if kind == "forced call":
        assert json.loads(re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer)[1])["name"] == "f"  # type: ignore[index]
    elif kind == "strict tool":
        assert len(limited) == 120
    else:
        assert re.fullmatch("[ab]{9}" if kind == "constraint" else "\0?[ab]{9}!", answer)
        assert kind != "tag" or limited[5:].count(257) == 1  # the special token, not its letters


def test_a_request_that_continues_another(complete: Complete) -> None:
    """Only the new tokens count."""
    first = complete("hi", max_tokens=5)
    more = pb.GenerationStart(continue_from=first.finished.request_id)
    limited = ids_of(complete(start=more, thinking_token_budget=2, max_tokens=9))
    assert [at for at, token_id in enumerate(limited) if token_id == CLOSES] == [2]
    written = {"continue_final_message": True}
    assert ids_of(complete("hi", "<think>I am", chat=written, thinking_token_budget=3)).index(CLOSES) == 3
    assert CLOSES not in ids_of(complete("hi", "<think>I am</think>", chat=written, thinking_token_budget=3))


def test_prompts_of_text(complete: Complete) -> None:
    open_text = pb.GenerationStart(text="Q: hi\n<think>\nSo")
    assert ids_of(complete(start=open_text, thinking_token_budget=3)).index(CLOSES) == 3
    closed = pb.GenerationStart(text="Q: hi\n<think>\nSo.\n</think>\n\n")
    assert CLOSES not in ids_of(complete(start=closed, thinking_token_budget=3))
