"""/v1/completions: what each field does, and that a streamed answer put together is the one that comes whole."""

import asyncio
from typing import Any

import pytest

from penstock.clients.gateway.schemas.completions import CompletionResponse
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig

PATH = "/v1/completions"
FORMS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"prompt": ["ab", "cde", "f"], "n": 2},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]], "echo": True},
    {"logprobs": 0},
    {"logprobs": 3, "n": 2},
    {"echo": True, "logprobs": 2},
    {"echo": True, "logprobs": 0, "prompt": "x"},
    {"echo": True, "max_tokens": 0, "logprobs": 1},
    {"stop": "e"},
    {"stop": ["zz", "de"], "include_stop_str_in_output": True},
    {"stop_token_ids": [100]},
    {"stop_token_ids": [100], "include_stop_str_in_output": True},
    {"return_token_ids": True, "n": 2},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
]


async def whole_of(gateway, **body):
    response = await gateway.post(PATH, **body)
    assert response.status_code == 200, response.text
    return response.json()


def put_together(chunks):
    """As a client does it: text and lists grow."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        CompletionResponse.model_validate(chunk, extra="forbid")
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "ids": [], "prompt_ids": None})
            choice["text"] += part["text"]
            choice["ids"] += part.get("token_ids") or []
            choice["prompt_ids"] = part.get("prompt_token_ids") or choice["prompt_ids"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] += values
            assert "finish_reason" not in choice or choice["finish_reason"] is None, "nothing follows the end"
            choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return choices


async def test_the_deltas_are_the_whole_answer(gateway, subtests):
    for fields in FORMS:
        with subtests.test(str(fields)):
            await compare(gateway, {"prompt": "ab", "max_tokens": 9, "seed": 1} | fields)


async def compare(gateway, body):
    whole = await whole_of(gateway, **body)
    CompletionResponse.model_validate(whole, extra="forbid")
    chunks = await gateway.chunks(PATH, stream_options={"include_usage": True}, **body)
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert usage["total_tokens"] == whole["usage"]["total_tokens"]
    streamed = put_together(chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        other = streamed[choice["index"]]
        assert choice["text"] == other["text"]
        assert choice["logprobs"] == other["logprobs"]
        assert (choice.get("token_ids") or []) == other["ids"]
        assert choice.get("prompt_token_ids") == other["prompt_ids"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (other["finish_reason"], other["stop_reason"])
    assert len(whole["choices"]) == len(streamed)


async def test_a_plain_completion(gateway):
    answer = await whole_of(gateway, prompt="ab", max_tokens=4, model="bytes")
    assert answer["choices"] == [
        {"index": 0, "text": "cdef", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "bytes"
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_completions_default_to_sixteen_tokens(gateway):
    assert (await whole_of(gateway, prompt="ab"))["usage"]["completion_tokens"] == 16


async def test_choices_of_several_prompts_are_in_order(gateway):
    answer = await whole_of(gateway, prompt=["a", "abc"], n=2, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "bc"),
        (1, "bc"),
        (2, "de"),
        (3, "de"),
    ]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 8


async def test_too_many_prompts_are_refused_before_each_is_looked_at(gateway):
    response = await gateway.post(PATH, prompt=[[1], "x"] * 1000)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompt: at most 1,024 prompts; there are 2,000"


async def test_logprobs_carry_tokens_and_their_text_offsets(gateway):
    answer = await whole_of(gateway, prompt="ab", max_tokens=3, logprobs=2, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "d", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert token in top
        assert len(top) in (2, 3)


async def test_tokens_that_are_no_characters_are_written_as_bytes(start_gateway):
    gateway = await start_gateway(next_token=lambda history, sampling: "é".encode()[len(history) % 2])
    answer = await whole_of(gateway, prompt="ab", max_tokens=4, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "éé"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"] * 2
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


async def test_a_scoring_request_generates_nothing(gateway):
    answer = await whole_of(gateway, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_logprobs_may_cover_only_the_prompt(gateway):
    answer = await whole_of(gateway, prompt="abc", max_tokens=1, prompt_logprobs=1)
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(ord("b"))]["decoded_token"] == "b"
    assert third[str(ord("c"))]["logprob"] <= 0


async def test_a_stop_string_is_left_out_or_kept(gateway):
    choice = (await whole_of(gateway, prompt="ab", stop="ef"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("cd", "stop", "ef")
    choice = (await whole_of(gateway, prompt="ab", stop="ef", include_stop_str_in_output=True))["choices"][0]
    assert choice["text"] == "cdef"


async def test_a_stop_token_is_reported(gateway):
    choice = (await whole_of(gateway, prompt="ab", stop_token_ids=[ord("f")]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("cde", "stop", ord("f"))


async def test_the_models_own_end_has_no_stop_reason(start_gateway):
    gateway = await start_gateway(next_token=lambda history, sampling: 256 if len(history) > 4 else ord("x"))
    choice = (await whole_of(gateway, prompt="ab"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("xxx", "stop", None)
    shown = await whole_of(gateway, prompt="ab", ignore_eos=True, skip_special_tokens=False, max_tokens=4)
    assert shown["choices"][0]["text"] == "xxx<|end|>"


async def test_usage_so_far_in_every_chunk(gateway):
    chunks = await gateway.chunks(
        PATH, prompt="ab", max_tokens=5, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "last", "each"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": None}, False, False),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": True, "continuous_usage_stats": None}, True, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
async def test_stream_options_are_read_as_vllm_reads_them(gateway, options, last, each):
    *others, end = await gateway.chunks(PATH, prompt="ab", max_tokens=3, stream_options=options)
    assert (not end["choices"] and end["usage"] is not None) == last
    assert all((chunk.get("usage") is not None) == each for chunk in others)


async def test_without_stream_an_empty_stream_options_is_none(gateway):
    forms: list[dict[str, Any] | None] = [None, {}]
    for options in forms:
        assert (await whole_of(gateway, prompt="ab", max_tokens=3, stream_options=options))["usage"]


@pytest.mark.parametrize("max_tokens", [96, 97, 4096, 10**6, 2**64])
async def test_max_tokens_is_cut_to_what_the_context_leaves(gateway, max_tokens):
    answer = await whole_of(gateway, prompt="a" * 4000, max_tokens=max_tokens)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (96, "length")


async def test_null_is_the_default_of_max_tokens(gateway):
    forms: list[dict[str, Any]] = [{}, {"max_tokens": None}]
    for fields in forms:
        assert (await whole_of(gateway, prompt="ab", **fields))["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["a" * 4080, [97] * 4080, ["a", "a" * 4080]])
async def test_the_default_of_max_tokens_must_fit(gateway, prompt):
    assert (await whole_of(gateway, prompt=prompt))["usage"]["completion_tokens"] % 16 == 0
    longer = [prompt[0], prompt[1] + "a"] if isinstance(prompt[0], str) and len(prompt) == 2 else prompt + prompt[:1]
    response = await gateway.post(PATH, prompt=longer)
    assert response.status_code == 400
    assert "leaves room for 15 more in the model's context of 4,096 tokens" in response.json()["error"]["message"]
    assert (await whole_of(gateway, prompt=longer, max_tokens=16))["usage"]["completion_tokens"] in (15, 31)
    assert (await whole_of(gateway, prompt=longer, truncate_prompt_tokens=-1))["usage"]["completion_tokens"] in (15, 31)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["abcdef", [97, 98, 99, 100, 101, 102]])
@pytest.mark.parametrize(("side", "kept"), [("left", [101, 102]), ("right", [97, 98]), (None, [101, 102])])
async def test_the_answer_shows_the_tokens_that_a_truncated_prompt_keeps(gateway, echo, prompt, side, kept):
    fields = {"prompt": prompt, "truncate_prompt_tokens": 2, "truncation_side": side, "echo": echo, "max_tokens": 1}
    answer = await whole_of(gateway, **fields, return_token_ids=True, prompt_logprobs=0)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == kept
    assert [list(entry) for entry in choice["prompt_logprobs"][1:]] == [[str(kept[1])]]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_without_stream_options_no_chunk_has_usage(gateway):
    chunks = await gateway.chunks(PATH, prompt="ab", max_tokens=3)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_sampling_reaches_the_engine(start_gateway):
    seen = []

    def note(history, sampling):
        seen.append(sampling)
        return ord("x")

    gateway = await start_gateway(next_token=note)
    await whole_of(
        gateway,
        prompt="ab",
        max_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={"5": 2},
        allowed_token_ids=[ord("x")],
        bad_words=["q"],
        min_tokens=1,
        priority=3,
    )
    sampling = seen[0]
    assert sampling.temperature == 0.5
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.top_k == 0
    assert sampling.min_p == pytest.approx(0.1)
    assert sampling.seed == 2**63 - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert sampling.repetition_penalty == 1.5


async def test_drafts_may_be_fewer(start_gateway):
    gateway = await start_gateway(service={"speculation": SpeculationConfig(DraftMethod.NGRAM, 8)})
    submit = gateway.executor.submit
    drafts: list[int] = []

    def submit_and_note(plan):
        drafts.extend(added.max_drafts for added in plan.added)
        submit(plan)

    gateway.executor.submit = submit_and_note
    for fields in ({}, {"max_draft_tokens": 3}):
        await whole_of(gateway, prompt="ab", max_tokens=1, **fields)
    assert drafts == [8, 3]


async def test_equal_seeds_and_answers_at_once(gateway):
    answers = await asyncio.gather(*(whole_of(gateway, prompt="ab", max_tokens=20, seed=3) for _ in range(20)))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert len({answer["id"] for answer in answers}) == 20
