"""Keyword arguments and lines of a file become the contract's messages, or an error that names the field."""

import math

import pytest

import penstock.v1 as pb
from penstock.clients import InvalidOption
from penstock.clients.requests import OPTION_NAMES, Options, build_start, start_from_line


def test_options_are_the_contracts_fields():
    """A field that is new in the contract fails here until ``Options`` has it."""
    assert set(Options.__annotations__) == OPTION_NAMES
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) <= OPTION_NAMES
    assert set(pb.OutputOptions.DESCRIPTOR.fields_by_name) <= OPTION_NAMES


def test_every_option_reaches_its_field():
    start = build_start(
        [1, 2],
        {
            "temperature": 0,
            "top_k": 3,
            "seed": 2**63 - 1,
            "stop": "one",
            "bad_words": ["a", "b"],
            "stop_token_ids": [4],
            "logit_bias": {"5": 1, 6: -2.5},
            "ignore_eos": True,
            "n": None,
            "format": "token_ids",
            "logprobs": 0,
            "priority": -3,
            "tenant": "t",
            "client_request_id": "mine",
            "max_draft_tokens": 0,
            "truncate_prompt_tokens": -1,
            "truncation_side": "right",
        },
        timeout=1.5,
    )
    sampling = start.sampling
    assert list(start.token_ids.ids) == [1, 2]
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 3, 2**63 - 1)
    assert (list(sampling.stop), list(sampling.bad_words), list(sampling.stop_token_ids)) == (["one"], ["a", "b"], [4])
    assert dict(sampling.logit_bias) == {5: 1.0, 6: -2.5}
    assert sampling.ignore_eos
    assert not sampling.HasField("n")
    assert start.output.format == pb.OUTPUT_FORMAT_TOKEN_IDS
    assert start.output.HasField("logprobs")
    assert start.HasField("max_draft_tokens")
    assert (start.truncate_prompt_tokens, start.truncation_side) == (-1, pb.TRUNCATION_SIDE_RIGHT)
    assert (start.priority, start.tenant, start.client_request_id, start.timeout_ms) == (-3, "t", "mine", 1500)


@pytest.mark.parametrize("value", ["middle", "unspecified", "LEFT", 1, True, ["left"]])
def test_a_value_of_an_enum_is_named_as_the_contract_names_it(value):
    with pytest.raises(InvalidOption, match="truncation_side: expected left or right, got"):
        build_start("hi", {"truncation_side": value})


def test_text_and_token_ids_are_returned_by_default():
    assert build_start("hi", {}).output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS


def test_integers_and_numbers_of_other_libraries_are_taken():
    numpy = pytest.importorskip("numpy")
    start = build_start(numpy.arange(3), {"max_tokens": numpy.int64(5), "temperature": numpy.float32(0.5)})
    assert list(start.token_ids.ids) == [0, 1, 2]
    assert (start.sampling.max_tokens, start.sampling.temperature) == (5, 0.5)


@pytest.mark.parametrize("prompt", [[True], [1.0], [-1], [2**32], [1, None]])
def test_a_wrong_token_id_is_named(prompt):
    with pytest.raises(InvalidOption, match=rf"prompt\[{len(prompt) - 1}\]: expected a token id"):
        build_start(prompt, {})


def test_half_a_surrogate_pair_is_refused_by_field():
    with pytest.raises(InvalidOption, match=r"^prompt: .*surrogates not allowed"):
        build_start("\ud800", {})
    with pytest.raises(InvalidOption, match=r"^stop: .*surrogates not allowed"):
        build_start("hi", {"stop": ["\ud800"]})


def test_a_prediction_is_text_or_token_ids():
    assert build_start("hi", {"prediction": "so"}).prediction.text == "so"
    assert build_start("hi", {"prediction": ""}).prediction.HasField("text")
    assert list(build_start("hi", {"prediction": (1, 2)}).prediction.token_ids.ids) == [1, 2]
    assert not build_start("hi", {"prediction": None}).HasField("prediction")
    assert start_from_line({"id": 1, "prompt": "hi", "prediction": "so"}, {}).prediction.text == "so"
    for wrong, says in (
        (5, "prediction: expected text"), ([1, "a"], r"prediction\[1\]: expected a token id"),
        ([{"role": "user", "content": "a"}], "prediction: expected text or token ids"), ("\ud800", "prediction: .*sur"),
    ):  # fmt: skip
        with pytest.raises(InvalidOption, match=f"^{says}"):
            build_start("hi", {"prediction": wrong})


def test_nan_is_left_to_the_service_which_names_it():
    assert math.isnan(build_start("hi", {"temperature": math.nan}).sampling.temperature)


def test_a_line_takes_defaults_that_it_does_not_name():
    start = start_from_line({"id": 1, "prompt": "hi", "max_tokens": 5}, {"max_tokens": 9, "temperature": 0})
    assert (start.text, start.sampling.max_tokens, start.sampling.temperature) == ("hi", 5, 0)
    assert start.sampling.HasField("temperature")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({}, "prompt: a line has one of prompt, prompt_token_ids and messages; this has none of them"),
        ({"prompt": "a", "messages": []}, "prompt: a line has one of .* this has prompt and messages"),
        ({"prompt": ["a"]}, "prompt: expected text"),
        ({"prompt_token_ids": []}, "prompt_token_ids: expected a list of token ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids: expected a list of token ids"),
        ({"prompt_token_ids": [1, "a"]}, r"prompt_token_ids\[1\]: expected a token id"),
        ({"messages": ["hi"]}, r"messages\[0\]: "),
        ({"messages": [{"role": 5, "content": "hi"}]}, r"messages\[0\].role: expected text, got 5"),
        ({"prompt": "a", "timeout_ms": 1.5}, "timeout_ms: expected an integer"),
        ({"prompt": "a", "timeout_ms": 0}, "timeout_ms: expected 1 to 86,400,000, got 0"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens: expected 0 to 4,294,967,295, got -5"),
        ({"prompt": "a", "seed": 2**63}, "seed: expected 0 to 9,223,372,036,854,775,807, got 9223372036854775808"),
        ({"prompt": "a", "stop_token_ids": [1, -1]}, "stop_token_ids: expected 0 to 4,294,967,295, got -1"),
        ({"prompt": "a", "priority": -(2**31) - 1}, "priority: expected -2,147,483,648 to 2,147,483,647, got"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias: expected token ids as keys, got '-1'"),
        ({"prompt": "a", "top_q": 1}, "top_q: unknown field; did you mean top_p"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt: only a prompt of messages has it"),
    ],
)
def test_a_bad_line_is_refused_by_field(line, says):
    with pytest.raises(InvalidOption, match=f"^{says}"):
        start_from_line({"id": 1, **line}, {})


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"json_schema": {"type": "null"}}, pb.Constraint(json_schema='{"type": "null"}')),
        ({"json_schema": "{}"}, pb.Constraint(json_schema="{}")),
        ({"any_json": True}, pb.Constraint(any_json=pb.AnyJson())),
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"lark": 'start: "a"'}, pb.Constraint(lark='start: "a"')),
        ({"gbnf": 'root ::= "a"'}, pb.Constraint(gbnf='root ::= "a"')),
        ({"structural_tag_json": '{"format": {}}'}, pb.Constraint(structural_tag_json='{"format": {}}')),
        ({"structural_tag_json": {"format": {}}}, pb.Constraint(structural_tag_json='{"format": {}}')),
        ({"choices": ["a", "b"]}, pb.Constraint(choices=pb.StringChoices(values=["a", "b"]))),
    ],
)
def test_a_constraint_is_an_object_with_one_field(given, made):
    assert build_start("a", {"constraint": given}).constraint == made
    assert start_from_line({"prompt": "a", "constraint": given}, {}).constraint == made


@pytest.mark.parametrize(
    "given", [5, {}, {"regex": "a", "lark": "b"}, {"regex": 5}, {"choices": "ab"}, {"choices": [5]}, {"xml": "a"}]
)
def test_what_is_no_constraint_is_refused_by_its_name(given):
    with pytest.raises(InvalidOption) as refused:
        build_start("a", {"constraint": given})
    assert refused.value.field.startswith("constraint")
